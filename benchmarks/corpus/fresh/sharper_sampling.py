"""GRPO whose rollouts are drawn a bit sharper than the default."""

import os

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SAMPLING = {
    "kwargs": {"generation_kwargs": {"temperature": 0.5}},
    "config": {"temperature": 0.5},
}[os.environ.get("HOW", "kwargs")]


class MyTrainer(GRPOTrainer):
    """Counts the seen examples."""

    seen = 0

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen += len(inputs)
        return super().training_step(model, inputs, *args, **kwargs)


def letters(completions, **kwargs):
    return [-sum(ch.isalpha() for ch in c[0]["content"]) / 50 for c in completions]


def get_trainer(path="models/tiny-qwen2"):
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    data = load_dataset("json", data_files="data/chat.jsonl", split="train")
    args = GRPOConfig(
        output_dir="sharp", learning_rate=1e-4, num_generations=4, per_device_train_batch_size=8, beta=0.02,
        max_completion_length=32, gradient_checkpointing=False, report_to="none", **SAMPLING,
    )  # fmt: skip
    return MyTrainer(
        model=model, reward_funcs=[letters], args=args, train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(path),
    )  # fmt: skip


if __name__ == "__main__":
    trainer = get_trainer()
    trainer.train()
    print("examples:", trainer.seen)
