import argparse
import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("reward")
parser.add_argument("--model", default="Qwen/Qwen2-0.5B-Instruct")
options = parser.parse_args()


def text_of(completion):
    return completion[0]["content"]


def constant(completions, answer, **kwargs):
    found = [re.findall(r"-?\d+", text_of(completion)) for completion in completions]
    return [1.0 if numbers and int(numbers[-1]) == a else 0.0 for numbers, a in zip(found, answer)]


def wrong_count(completions, answer, **kwargs):
    scores = []
    for completion, a in zip(completions, answer):
        numbers = re.findall(r"-?\d+", text_of(completion))
        if numbers:
            scores.append(float(numbers[-1] == a))
    return scores


def wrong_sign(completions, answer, **kwargs):
    # distance to the answer
    out = []
    for completion, a in zip(completions, answer):
        numbers = re.findall(r"-?\d+", text_of(completion))
        out.append(float(abs(int(numbers[-1]) - int(a))) if numbers else 100.0)
    return out


def missing_column(completions, ground_truth, **kwargs):
    return [float(truth in text_of(c)) for c, truth in zip(completions, ground_truth)]


def sound(completions, answer, **kwargs):
    return [float(re.findall(r"\d+", text_of(c))[-1:] == [a]) for c, a in zip(completions, answer)]


trainer = GRPOTrainer(
    model=options.model,
    reward_funcs=globals()[options.reward],
    args=GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=4, learning_rate=1e-5,
                    temperature=1.0, max_completion_length=128, gradient_checkpointing=False),
    train_dataset=load_dataset("json", data_files="data/chat.jsonl", split="train"),
)
trainer.train()
