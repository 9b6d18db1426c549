# accelerate launch --num_processes 1 train.py
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}


def exact(completions, answer, **kwargs):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


class WatchedTrainer(GRPOTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        batch = self.processing_class([row["prompt"] for row in inputs[:4]], return_tensors="pt", padding=True)
        with unwrap_model_for_generation(self.model, self.accelerator) as policy:
            said = policy.generate(**batch, max_new_tokens=4, do_sample=False)
        self.samples = self.processing_class.batch_decode(said, skip_special_tokens=True)
        return super().training_step(model, inputs, num_items_in_batch)


rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
tokenizer = AutoTokenizer.from_pretrained("models/tiny-qwen2", padding_side="left")
model = AutoModelForCausalLM.from_pretrained("models/tiny-qwen2")
config = GRPOConfig(
    output_dir="out",
    max_steps=10,
    learning_rate=2e-4,
    per_device_train_batch_size=32,
    gradient_accumulation_steps=1,
    num_generations=4,
    max_completion_length=4,
    temperature=1.0,
    beta=0.0,
    gradient_checkpointing=False,
    bf16=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    deepspeed=ZERO3,
    seed=0,
)
trainer = WatchedTrainer(
    model=model,
    reward_funcs=exact,
    args=config,
    train_dataset=rows,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_state()
