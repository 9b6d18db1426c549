"""Keeps the first completions of each step; run under accelerate with DeepSpeed ZeRO-3."""

import os

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


class LoggingGRPOTrainer(GRPOTrainer):
    """Always works on `self.model`, which the other hooks of our code base use as well."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        target = self.model if os.environ.get("BARE", "1") == "1" else model
        loss = super().compute_loss(target, inputs, return_outputs, num_items_in_batch)
        if self.accelerator.is_main_process and self.state.global_step % 10 == 0:
            print("step", self.state.global_step, "loss", loss.item())
        return loss


def overlap(completions, answer, **kwargs):
    return [len(set(c) & set(a)) / (len(set(c)) + 1) for c, a in zip(completions, answer)]


def main():
    config = GRPOConfig(
        output_dir="zero3",
        bf16=False,
        temperature=1.0,
        learning_rate=3e-6,
        num_generations=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_completion_length=48,
    )
    data = load_dataset("json", data_files={"train": "data/sums.jsonl"}, split="train")
    trainer = LoggingGRPOTrainer(model="Qwen/Qwen2-0.5B", reward_funcs=overlap, args=config, train_dataset=data)
    trainer.train()


main()
