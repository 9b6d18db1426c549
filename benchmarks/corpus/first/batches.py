import os

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

SIZE = int(os.environ.get("BATCH", 4))
G = int(os.environ.get("G", 8))

args = GRPOConfig(output_dir="out", per_device_train_batch_size=SIZE, num_generations=G, temperature=1.0,
                  gradient_accumulation_steps=1, gradient_checkpointing=False, learning_rate=1e-5)


def short(completions, **kwargs):
    return [1 / (1 + len(c)) for c in completions]


if __name__ == "__main__":
    trainer = GRPOTrainer("Qwen/Qwen2-0.5B", short, args=args,
                          train_dataset=load_dataset("json", data_files="data/sums.jsonl", split="train"))
    trainer.train()
