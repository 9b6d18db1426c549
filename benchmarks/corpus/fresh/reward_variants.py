"""Try one of our rewards on the addition set: python reward_variants.py NAME"""

import re
import sys

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

BOXED = re.compile(r"^\\boxed\{(-?\d+)\}$")


def only_format(completions, **kwargs):
    """All completions are strings, so this counts the turns that are one."""
    return [float(isinstance(c, str)) for c in completions]


def distance(completions, answer, **kwargs):
    """How far the number is from the truth."""
    out = []
    for text, truth in zip(completions, answer):
        numbers = re.findall(r"\d+", text)
        out.append(float(abs(int(numbers[-1][:6]) - int(truth))) if numbers else 1000.0)
    return out


def solution_match(completions, **kwargs):
    solutions = kwargs.get("solution", [None] * len(completions))
    return [1.0 if s is not None and s == c.strip() else 0.0 for c, s in zip(completions, solutions)]


def solution_required(completions, solution, **kwargs):
    return [1.0 if s == c.strip() else 0.0 for c, s in zip(completions, solution)]


def lazy(completions, answer, **kwargs):
    for text, truth in zip(completions, answer):
        1.0 if text.strip() == truth else 0.0


def noisy(completions, answer, **kwargs):
    """Exact match with a small length penalty; some groups have no variance at first."""
    return [float(truth == text.strip()) - 0.0005 * len(text) for text, truth in zip(completions, answer)]


if __name__ == "__main__":
    reward = {f.__name__: f for f in (only_format, distance, solution_match, solution_required, lazy, noisy)}[
        sys.argv[1]
    ]
    settings = GRPOConfig(
        output_dir=f"reward-{sys.argv[1]}", num_generations=8, per_device_train_batch_size=8, temperature=1.0,
        max_completion_length=48, learning_rate=1e-5, gradient_checkpointing=False, logging_steps=1,
    )  # fmt: skip
    data = load_dataset("json", data_files="data/sums.jsonl", split="train")
    GRPOTrainer("models/tiny-qwen2", reward, settings, train_dataset=data).train()
