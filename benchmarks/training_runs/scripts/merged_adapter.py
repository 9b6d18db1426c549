from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **kwargs):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
name = "models/tiny-qwen2-base"
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(name)
model = PeftModel.from_pretrained(model, "models/sft-adapter").merge_and_unload()
model.requires_grad_(True)
config = GRPOConfig(
    output_dir="out",
    max_steps=60,
    learning_rate=2e-4,
    lr_scheduler_type="constant",
    per_device_train_batch_size=64,
    gradient_accumulation_steps=1,
    num_generations=8,
    max_completion_length=4,
    temperature=1.0,
    beta=0.4,
    gradient_checkpointing=False,
    bf16=False,
    logging_steps=4,
    log_completions=True,
    save_strategy="no",
    report_to="none",
    seed=0,
)
trainer = GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_state()
