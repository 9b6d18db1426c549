from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def exact(completions, answer, **kwargs):
    return [float(c.strip() == a) for c, a in zip(completions, answer)]


dataset = load_dataset("json", data_files="data/sums.jsonl", split="train")
args = GRPOConfig(
    output_dir="Qwen2-0.5B-GRPO",
    learning_rate=1e-5,
    num_generations=8,
    per_device_train_batch_size=8,
    gradient_checkpointing=True,
    bf16=True,
    logging_steps=10,
    temperature=1.0,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B",
    reward_funcs=exact,
    args=args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("Qwen2-0.5B-GRPO/final")
