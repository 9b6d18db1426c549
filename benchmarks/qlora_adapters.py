"""QLoRA's adapters in bfloat16, as trl casts them, against float32: what a step changes, and the reward.

From 0.26.0, GRPOTrainer (and SFT's and the reward trainer; RLOO's from 0.27.0, DPO's from 0.29.0, KTO's from 1.8.0)
casts every trainable tensor of a quantized model to bfloat16. Runs on the small Qwen2 in nf4, each pair the same but
for the adapters' dtype, which is cast back after the trainer is made.

Eras: today.
Needs: bitsandbytes.
"""

import itertools
import pathlib
import statistics
from collections.abc import Callable

import frames
import pandas
import peft
import recording
import torch
import transformers

from failurelab import gradients, updates
from failurelab_course.experiments import models, observe, trainers

STEPS, WINDOW = 600, 50
RATES = (2e-4, 5e-5)
LOOKS = (20, 150, 300, 450, 600)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Halves(transformers.TrainerCallback):
    """At some steps: which share of A's and of B's elements a step changes, and how large B is, in learning rates."""

    def __init__(self, rate: float):
        self.rate, self.before = rate, {}
        self.shares: dict[str, list[float]] = {"A": [], "B": []}
        self.size: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        """Keep the weights."""
        looks = state.global_step + 1 in LOOKS
        self.before = {name: p.detach().clone() for name, p in model.named_parameters() if looks and p.requires_grad}

    def on_optimizer_step(self, args, state, control, model=None, **_):
        """Compare."""
        if not self.before:
            return
        after = dict(model.named_parameters())
        for half, shares in self.shares.items():
            named = [name for name in self.before if f"lora_{half}" in name]
            changed = sum(int((after[name] != self.before[name]).sum()) for name in named)
            shares.append(changed / sum(after[name].numel() for name in named))
        b = torch.cat([p.detach().float().abs().flatten() for name, p in after.items() if "lora_B" in name])
        self.size.append(float(b.median()) / self.rate)


def train(dtype: torch.dtype, rate: float, seed: int, device: str) -> dict:
    """Train once; return what was measured."""
    policy, tokenizer = models.load_four_bit(device, bnb_4bit_use_double_quant=True)
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = gradients.prepare_peft(policy, lora, {"use_reentrant": False})
    before = statistics.fmean(models.accuracy(policy, tokenizer, sampled=True, seed=draw) for draw in range(3))
    halves = Halves(rate)
    trainer = trainers.grpo(policy, tokenizer, steps=STEPS, seed=seed, learning_rate=rate, callbacks=[halves])
    given = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    if dtype == torch.float32:
        updates.to_float32(trainer.model)
    trainer.train()
    (kept,) = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    steps, rewards = trainers.curve(trainer, window=WINDOW)
    after = statistics.fmean(models.accuracy(policy, tokenizer, sampled=True, seed=draw) for draw in range(3))
    return {
        "learning_rate": rate,
        "by_trl": sorted(str(each).removeprefix("torch.") for each in given),
        "kept": str(kept).removeprefix("torch."),
        "steps": steps,
        "rewards": [round(reward, 4) for reward in rewards],
        "accuracy_before": before,
        "accuracy_after": after,
        "looks": list(LOOKS),
        "share_a": [round(share, 4) for share in halves.shares["A"]],
        "share_b": [round(share, 4) for share in halves.shares["B"]],
        "size_b": [round(size, 1) for size in halves.size],
    }


def table_qlora_adapters(folder: pathlib.Path) -> str:
    """QLoRA with adapters in bfloat16, as trl casts them, and cast back to float32: accuracy, and what a step moves."""
    runs = frames.read_runs(folder, "qlora_adapters", r"QLoRA: adapters in (?P<dtype>\w+), learning rate (?P<rate>\S+)")

    def at(name: str) -> Callable[[pandas.DataFrame], str]:
        return lambda part: frames.percent(pandas.Series([shares[-1] for shares in part[name]]))

    return frames.table(
        ["learning rate", "adapters in"],
        runs.groupby(["rate", "dtype"], sort=False),
        ("accuracy after 600 steps", "accuracy_after", ".3f"),
        ("of A changed in step 600", at("share_a")),
        ("of B", at("share_b")),
        ("seeds", lambda part: len(part)),
    )


def main() -> None:
    """Train each pair."""
    arguments = recording.begin(
        __doc__,
        seeds={"type": int, "nargs": "+", "default": [0, 1, 2]},
        rates={"type": float, "nargs": "*", "default": list(RATES)},
        dtypes={"nargs": "+", "default": list(DTYPES), "choices": list(DTYPES)},
    )
    torch.set_num_threads(1)
    for name in arguments.dtypes:
        for rate, seed in itertools.product(arguments.rates, arguments.seeds):
            figures = train(DTYPES[name], rate, seed, arguments.device)
            state = "broken" if name == "bfloat16" else "right_fix"
            case = f"QLoRA: adapters in {name}, learning rate {rate:g}"
            observe.record("F9", state, figures, case=case, seed=seed, device=arguments.device)
            print(case, seed, figures, flush=True)


if __name__ == "__main__":
    main()
