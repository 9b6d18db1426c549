"""Curves that notebooks 09 to 11 draw: the same run broken and healed, three seeds each.

09: weights in bfloat16 and in float32, by learning rate.
10: vLLM's sleep mode (a stand-in for vLLM), with the two lines that trl 0.28 to 1.9 had (TRL #5312), and without them,
    and no sleep mode at all.
11: a reward that compares with the dataset's list instead of the batch's column, also at ten times the learning rate.

Eras: today.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator

import recording
import torch
import transformers
from datasets import Dataset

from failurelab import updates
from failurelab_course.experiments import models, trainers, vllm_stand_in

SEEDS = 3
SAMPLING = "sampling/sampling_logp_difference/mean"


def measure(trainer, policy, tokenizer, window: int, prompts=None) -> dict:
    """Train; return the curve, and what the model does by hand afterwards."""
    trainer.train()
    steps, rewards = trainers.curve(trainer, window=window)
    policy = policy.float()
    draws = [models.accuracy(policy, tokenizer, sampled=True, seed=draw, prompts=prompts) for draw in range(3)]
    rewards = [round(reward, 4) for reward in rewards]
    return {"steps": steps, "rewards": rewards, "accuracy_after": statistics.fmean(draws)}


def as_rows(asked: list[tuple[str, str]]) -> Dataset:
    """Return pairs of prompt and answer as a dataset."""
    return Dataset.from_dict({"prompt": [prompt for prompt, _ in asked], "answer": [answer for _, answer in asked]})


def rounded(dtype: torch.dtype, rate: float, seed: int, device: str) -> dict:
    """Train weights of a dtype, from a checkpoint as it would be on a hub: in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        for part in models.load(dtype=torch.bfloat16):
            part.save_pretrained(folder)
        policy, tokenizer = models.load(folder, dtype=dtype, device=device)
    predicted = updates.share_that_changes(policy, rate)
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    trainer = trainers.grpo(
        policy, tokenizer, steps=300, seed=seed, learning_rate=rate, prompts_per_step=8, num_generations=4
    )
    trainer.add_callback(counted := Changed(before))
    figures = measure(trainer, policy, tokenizer, 20)
    return figures | {"learning_rate": rate, "predicted": predicted.share, "changed": counted.share}


class Changed(transformers.TrainerCallback):
    """Which share of the elements training has changed."""

    def __init__(self, before: dict[str, torch.Tensor]):
        self.before, self.share = before, 0.0

    def on_train_end(self, args, state, control, model=None, **_):
        """Compare with the start."""
        after = dict(model.named_parameters())
        changed = sum(int((after[name].detach() != start).sum()) for name, start in self.before.items())
        self.share = changed / sum(start.numel() for start in self.before.values())


def slept(reloads: bool, options: dict, seed: int, device: str) -> dict:
    """Train under `use_vllm`, in colocate mode."""
    vllm_stand_in.install(reloads=reloads)
    policy, tokenizer = models.load(device=device)
    asked = [(f"{a}+{b}=", f"{a + b}") for a in range(10) for b in range(10)]
    trainer = trainers.grpo(
        policy, tokenizer, steps=60, seed=seed, learning_rate=4e-4, prompts_per_step=8, num_generations=8,
        rows=as_rows(asked), use_vllm=True, vllm_mode="colocate", logging_steps=1, **options,
    )  # fmt: skip
    figures = measure(trainer, policy, tokenizer, 10, asked * 4)
    gaps = [row[SAMPLING] for row in trainer.state.log_history if SAMPLING in row]
    return figures | {"gaps": [round(gap, 4) for gap in gaps]}


def rewarded(by_list: bool, seed: int, device: str, rate: float = 2e-4) -> dict:
    """Train with a reward that compares with the column, or with the script's own list, by place."""
    policy, tokenizer = models.load(device=device)
    answers = [answer for _, answer in models.sums()]

    def correct(completions, answer, **_):
        right = answers if by_list else answer
        return [float(text.strip() == wanted) for text, wanted in zip(completions, right)]

    trainer = trainers.grpo(
        policy,
        tokenizer,
        steps=60,
        seed=seed,
        learning_rate=rate,
        prompts_per_step=8,
        num_generations=8,
        reward=correct,
    )
    return measure(trainer, policy, tokenizer, 10)


def cases(device: str) -> Iterator[tuple[str, str, str, Callable[[int], dict]]]:
    """Yield failure, state, case, and what runs it with a seed."""
    for rate in (3e-5, 1e-4, 4e-4, 2e-3):
        for name, dtype in {"bfloat16": torch.bfloat16, "float32": torch.float32}.items():
            yield "F9", "measured", f"09: {name}, {rate:g}", lambda seed, d=dtype, r=rate: rounded(d, r, seed, device)
    sleeps, corrects = "vllm_enable_sleep_mode", "vllm_importance_sampling_correction"
    ways = {
        "sleep mode, trl 0.28 to 1.9": (True, {sleeps: True}),
        "sleep mode": (False, {sleeps: True}),
        "no sleep mode": (False, {}),
        "no importance weights": (True, {sleeps: True, corrects: False}),
    }
    for name, (reloads, options) in ways.items():
        yield "F16", "measured", f"10: {name}", lambda seed, r=reloads, o=options: slept(r, o, seed, device)
    rewards = {"answers, the list": (True, 2e-4), "answers, ten times the rate": (True, 2e-3)}
    for name, (by_list, rate) in (rewards | {"answer, the column": (False, 2e-4)}).items():
        yield "F14", "measured", f"11: {name}", lambda seed, b=by_list, r=rate: rewarded(b, seed, device, r)


def main() -> None:
    """Run all, or the cases that begin as `--only` says."""
    arguments = recording.begin(__doc__, only="")
    torch.set_num_threads(1)
    chosen = (case for case in cases(arguments.device) if case[2].startswith(arguments.only))
    recording.record_cases(chosen, SEEDS, arguments.device)


if __name__ == "__main__":
    main()
