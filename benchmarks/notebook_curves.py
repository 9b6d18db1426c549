"""Curves that notebooks 08 to 11 draw: the same run broken and healed, three seeds each.

08: trl 0.14 scores prompts of unequal length without an attention mask (TRL #2708). Half of the sums are bare (`3+4=`),
    half stand in the chat template, which is 21 tokens longer. 16 prompts as one batch; and one prompt a batch.
09: weights in bfloat16 and in float32, by learning rate.
10: vLLM's sleep mode (a stand-in for vLLM), with the two lines that trl 0.28 to 1.9 had (TRL #5312), and without them.
11: a reward that compares with the dataset's list instead of the batch's column.

Eras: trl-0.14, trl-0.15, today.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator

import recording
import torch
import transformers
from datasets import Dataset

from failurelab import textbook, updates
from failurelab_course.experiments import models, observe, trainers, vllm_stand_in

SEEDS = 3
SAMPLING = "sampling/sampling_logp_difference/mean"


def measure(trainer, policy, tokenizer, window: int, prompts=None) -> dict:
    """Train; return the curve, and what the model does by hand afterwards."""
    trainer.train()
    steps, rewards = trainers.curve(trainer, window=window)
    policy = policy.float()
    draws = [models.accuracy(policy, tokenizer, sampled=True, seed=draw, prompts=prompts) for draw in range(3)]
    rewards = [round(reward, 4) for reward in rewards]
    rewards = [round(reward, 4) for reward in rewards]
    return {"steps": steps, "rewards": rewards, "accuracy_after": statistics.fmean(draws)}


def as_rows(asked: list[tuple[str, str]]) -> Dataset:
    """Return pairs of prompt and answer as a dataset."""
    return Dataset.from_dict({"prompt": [prompt for prompt, _ in asked], "answer": [answer for _, answer in asked]})


def unequal(work: dict, seed: int, device: str) -> dict:
    """Train on prompts of unequal length, the first step beside the textbook."""
    policy, tokenizer = models.load(device=device)
    asked = []
    for place, (prompt, answer) in enumerate(models.sums()):
        message = [{"role": "user", "content": prompt}]
        chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        asked.append((chat if place % 2 else prompt, answer))
    trainer = trainers.grpo(
        policy, tokenizer, steps=100, seed=seed, learning_rate=4e-4, num_generations=4, beta=0.04,
        rows=as_rows(asked), **work,
    )  # fmt: skip
    with textbook.compare(trainer, with_suspects=False) as comparison:
        figures = measure(trainer, policy, tokenizer, 10, asked)
    apart = comparison.report.apart
    return figures | {"cosine": apart.cosine, "size": apart.size}


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


def slept(block: Callable, options: dict, seed: int, device: str) -> dict:
    """Train under `use_vllm`, in colocate mode."""
    vllm_stand_in.install()
    policy, tokenizer = models.load(device=device)
    asked = [(f"{a}+{b}=", f"{a + b}") for a in range(10) for b in range(10)]
    with block():
        trainer = trainers.grpo(
            policy, tokenizer, steps=60, seed=seed, learning_rate=4e-4, prompts_per_step=8, num_generations=8,
            rows=as_rows(asked), use_vllm=True, vllm_mode="colocate", logging_steps=1, **options,
        )  # fmt: skip
        figures = measure(trainer, policy, tokenizer, 10, asked * 4)
    gaps = [row[SAMPLING] for row in trainer.state.log_history if SAMPLING in row]
    return figures | {"gaps": [round(gap, 4) for gap in gaps]}


def rewarded(by_list: bool, seed: int, device: str) -> dict:
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
        learning_rate=2e-4,
        prompts_per_step=8,
        num_generations=8,
        reward=correct,
    )
    return measure(trainer, policy, tokenizer, 10)


def cases() -> Iterator[tuple[str, str, Callable[[int, str], dict]]]:
    """Yield failure, case, and what runs it, of this era."""
    accumulated = {"prompts_per_step": 1, "gradient_accumulation_steps": 16}
    for name, work in {"16 prompts a batch": {}, "one prompt a batch": accumulated}.items():
        yield "F21", f"08: {name}", lambda seed, device, work=work: unequal(work, seed, device)
    if observe.era() != "today":
        return
    for rate in (3e-5, 1e-4, 4e-4, 2e-3):
        for name, dtype in {"bfloat16": torch.bfloat16, "float32": torch.float32}.items():
            yield "F9", f"09: {name}, {rate:g}", lambda seed, device, d=dtype, r=rate: rounded(d, r, seed, device)
    sleeps, corrects = "vllm_enable_sleep_mode", "vllm_importance_sampling_correction"
    ways = {
        "sleep mode, trl 0.28 to 1.9": (vllm_stand_in.reload_at_each_call, {sleeps: True}),
        "sleep mode": (contextlib.nullcontext, {sleeps: True}),
        "no importance weights": (vllm_stand_in.reload_at_each_call, {sleeps: True, corrects: False}),
    }
    for name, (block, options) in ways.items():
        yield "F16", f"10: {name}", lambda seed, device, b=block, o=options: slept(b, o, seed, device)
    for name, by_list in {"answers, the list": True, "answer, the column": False}.items():
        yield "F14", f"11: {name}", lambda seed, device, by_list=by_list: rewarded(by_list, seed, device)


def main() -> None:
    """Run all, or the cases that begin as `--only` says; record and print."""
    arguments = recording.begin(__doc__, only="")
    torch.set_num_threads(1)
    for failure, case, run in cases():
        if not case.startswith(arguments.only):
            continue
        for seed in range(SEEDS):
            figures = run(seed, arguments.device)
            observe.record(failure, "measured", figures, case=case, seed=seed, device=arguments.device)
            print(observe.era(), case, seed, figures, flush=True)


if __name__ == "__main__":
    main()
