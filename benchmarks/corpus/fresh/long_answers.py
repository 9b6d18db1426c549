import os

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

LIMIT = int(os.environ.get("MAX_NEW", 16))


def problem(n):
    steps = [f"{n} plus {k} is {n + k}" for k in range(1, 6)]
    return {
        "prompt": [{"role": "user", "content": f"Start at {n}. Add 1, 2, 3, 4 and 5 to it, and write every sum."}],
        "answer": "; ".join(steps) + f". The last one is {n + 5}.",
    }


def similarity(completions, answer, **kwargs):
    scores = []
    for c, a in zip(completions, answer):
        got, want = set(c[0]["content"].split()), set(a.split())
        scores.append(len(got & want) / max(1, len(got | want)))
    return scores


def finished(completions, **kwargs):
    return [0.1 * c[0]["content"].rstrip().endswith(".") for c in completions]


ds = Dataset.from_list([problem(n) for n in range(120)])
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=[similarity, finished],
    args=GRPOConfig(
        "long", max_completion_length=LIMIT, num_generations=4, per_device_train_batch_size=4, temperature=1.0,
        mask_truncated_completions=True, gradient_checkpointing=False, learning_rate=2e-6, bf16=False,
    ),
    train_dataset=ds,
)  # fmt: skip
trainer.train()
print("done after", trainer.state.global_step)
