"""Updates that round to nothing: elements changed and reward, by dtype and learning rate, and each cure's curve.

Every run predicts the share of elements that its first step changes, measures it, and has an UpdateGuard on. What a
share means for learning is measured on its own: bfloat16 beside float32 at the same rate, for long enough to learn.

Eras: trl-0.14, today.
"""

import itertools
import pathlib
import statistics
import tempfile

import frames
import recording
import torch
import transformers

from failurelab import guards, updates
from failurelab_course.experiments import deepspeed, models, observe, trainers

SEEDS, CURE_STEPS, RATE = 3, 80, 3e-5
BF16, F32 = torch.bfloat16, torch.float32
WORK = {"prompts_per_step": 8, "num_generations": 4}
GRID = (
    *(("full", dtype, rate, steps) for dtype in (BF16, F32) for rate, steps in ((1e-6, 20), (RATE, 40), (4e-4, 40))),
    *(("LoRA", dtype, rate, 20) for dtype in (BF16, F32) for rate in (1e-6, 3e-3)),
    *(("LoRA, adapters in bfloat16", BF16, rate, 20) for rate in (1e-6, 3e-3)),
)
SHARES = ((3e-6, 600), (1e-5, 600), (3e-5, 200), (1e-4, 200), (2e-4, 200), (4e-4, 200))


class Copies(torch.optim.AdamW):
    """AdamW on float32 copies, which are rounded into the model's weights after each step."""

    def __init__(self, model: torch.nn.Module, rate: float):
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__([parameter.detach().float() for parameter in self.weights], lr=rate, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure=None):
        """Step the copies, and round them into the weights."""
        copies = self.param_groups[0]["params"]
        for copy, weights in zip(copies, self.weights):
            copy.grad = None if weights.grad is None else weights.grad.float()
        super().step()
        for copy, weights in zip(copies, self.weights):
            self.write(copy, weights)

    def write(self, copy: torch.Tensor, weights: torch.Tensor) -> None:
        """Round to nearest; the copy keeps what is lost."""
        weights.copy_(copy)


class Stochastic(Copies):
    """Rounds up or down at random, as likely as the number lies near either; nothing is kept beside the weights."""

    def write(self, copy: torch.Tensor, weights: torch.Tensor) -> None:
        """Add noise to the 16 bits that bfloat16 lacks, and cut them off."""
        bits = copy.view(torch.int32)
        weights.copy_(((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(F32))
        copy.copy_(weights)


class Shares(transformers.TrainerCallback):
    """Which share of the elements with a gradient each optimizer step changes; `rest` without what began at zero."""

    def __init__(self):
        self.shares: list[float] = []
        self.rest: list[float] = []
        self.from_zero: set[int] = set()

    def on_train_begin(self, *_, model=None, **__):
        """Know an adapter's B."""
        self.from_zero = {id(p) for p in model.parameters() if p.requires_grad and not p.detach().any()}

    def on_pre_optimizer_step(self, *_, model=None, **__):
        """Keep the weights."""
        self.before = [(p, p.detach().clone(), p.grad != 0) for p in model.parameters() if p.grad is not None]

    def on_optimizer_step(self, *_, **__):
        """Compare."""
        rest = [row for row in self.before if id(row[0]) not in self.from_zero]
        for rows, shares in ((self.before, self.shares), (rest, self.rest)):
            with_gradient = sum(int(moved.sum()) for *_, moved in rows)
            changed = sum(int(((weights != before) & moved).sum()) for weights, before, moved in rows)
            if with_gradient:
                shares.append(changed / with_gradient)


def train(folder, dtype, rate, steps, seed, *, trained="full", optimizer=None, device="cpu", **options):
    """Return what one run did, as metrics."""
    policy, tokenizer = models.load(folder, dtype=dtype, device=device)
    if trained != "full":
        from peft import LoraConfig, get_peft_model

        transformers.set_seed(seed)
        policy = get_peft_model(policy, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        if "bfloat16" in trained:
            policy.to(BF16)
    start = [models.accuracy(policy, tokenizer, sampled=True, seed=draw) for draw in range(3)]
    predicted = updates.share_that_changes(policy, rate)
    before = {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}
    said: list[str] = []
    shares, guard = Shares(), guards.UpdateGuard(lambda notice: said.append(notice.kind))
    trainer = trainers.grpo(
        policy, tokenizer, steps=steps, seed=seed, learning_rate=rate, callbacks=[shares, guard], **WORK, **options
    )
    if optimizer:
        trainer.optimizer = optimizer(policy, rate)
    error = ""
    try:
        trainer.train()
    except RuntimeError as raised:  # float16: nothing can be drawn from weights that are NaN
        error = str(raised)
    after = dict(policy.named_parameters())
    changed = sum(int((after[name].detach() != start).sum()) for name, start in before.items())
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    reached = policy.float() if trained == "full" else policy
    draws = [0.0 if error else models.accuracy(reached, tokenizer, sampled=True, seed=draw) for draw in range(3)]
    first = next((share for share in shares.shares if share), 0.0)
    keeps = optimizer or options.get("deepspeed")
    seen, rest = (statistics.fmean(each[:3]) if each else 1.0 for each in (shares.shares, shares.rest))
    grade = updates.grade(seen)
    expected = "whole" if keeps else updates.grade(rest, 0) if grade == "whole" else grade
    return {
        "learning_rate": rate,
        "steps": steps,
        "changed": changed,
        "elements": predicted.elements,
        "predicted": predicted.share,
        "first_step": first,
        "relative_error": abs(predicted.share - first) / first if first else None,
        "grad_norm": statistics.median(norms) if norms else None,
        "rewards": [round(reward, 4) for reward in trainers.curve(trainer, window=max(1, steps // 5))[1]],
        "accuracy_before": statistics.fmean(start),
        "accuracy_after": statistics.fmean(draws),
        "error": error,
        "finite": all(bool(torch.isfinite(p).all()) for p in after.values()),
        "expected": expected,
        "said": ", ".join(said),
        "lost": expected != "whole",
        "alarm": bool(said),
    }


def cures(folder, device):
    """Yield each cure's name and what trains with it, a function of the seed."""
    given = {"dtype": BF16, "rate": RATE, "steps": CURE_STEPS, "device": device}

    def plain(**options):
        return lambda seed: train(folder, seed=seed, **given | options)

    yield "none", plain()
    yield "float32 weights", plain(dtype=F32)
    yield "float32 weights, bf16 autocast", plain(dtype=F32, bf16=True)
    yield "learning rate 4e-4", plain(rate=4e-4)
    yield "learning rate 2e-3", plain(rate=2e-3)
    yield "stochastic rounding", plain(optimizer=Stochastic)
    yield "float32 copies in the optimizer", plain(optimizer=Copies)


def engine(folder, device):
    """Train under DeepSpeed's bf16, whose optimizer keeps float32 copies, for a few steps."""
    with deepspeed.one_process(1, bf16={"enabled": True}) as config:
        return train(folder, BF16, RATE, 20, 0, device=device, deepspeed=config, bf16=True)


def table_rounding_shares(folder: pathlib.Path) -> str:
    """What a share of elements that a step changes means for learning: bfloat16 against float32 at the same rate."""
    runs = frames.read_runs(folder, "rounding", r"share: (?P<dtype>\w+), learning rate (?P<rate>\S+)")
    lines = []
    for (rate, steps), part in runs.groupby(["rate", "steps"], sort=False):
        low, whole = (part[part["dtype"] == dtype] for dtype in ("bfloat16", "float32"))
        gains = [
            statistics.fmean(each["accuracy_after"]) - statistics.fmean(each["accuracy_before"])
            for each in (low, whole)
        ]
        after = [frames.spread(part["accuracy_after"], ".3f") for part in (low, whole)]
        lines.append(
            f"- rate {rate}, {steps} steps: the first step changes {frames.percent(low['first_step'])} of the weights; "
            f"accuracy {after[0]}, in float32 {after[1]}: {gains[0] / gains[1]:.0%} of its gain"
        )
    return "\n".join(lines)


def table_update_guard(folder: pathlib.Path) -> str:
    """Runs with the failure and without, and what the guard said of them."""
    runs = frames.read_runs(folder, "rounding", "(?!share).*").astype({"lost": bool, "alarm": bool})
    found, warned = (frames.count(part["alarm"]) for part in (runs[runs["lost"]], runs[~runs["lost"]]))
    return f"- runs with the failure: found in {found}\n- healthy runs: warned of {warned}"


def main() -> None:
    """Run the parts that are asked for, record and print."""
    parts = {"nargs": "+", "default": ["grid", "shares", "cures"], "choices": ["grid", "shares", "cures"]}
    arguments = recording.begin(__doc__, parts=parts, seeds={"type": int, "nargs": "+", "default": list(range(SEEDS))})
    device, seeds, today = arguments.device, arguments.seeds, observe.era() == "today"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # the checkpoint as it would be on a hub: in bfloat16
        for part in models.load(dtype=BF16):
            part.save_pretrained(folder)
        for (trained, dtype, rate, steps), seed in itertools.product(GRID if "grid" in arguments.parts else (), seeds):
            record(f"{trained}, {name(dtype)}, learning rate {rate:g}", seed, device,
                   train(folder, dtype, rate, steps, seed, trained=trained, device=device))  # fmt: skip
        for (rate, steps), dtype, seed in itertools.product(
            SHARES if today and "shares" in arguments.parts else (), (BF16, F32), seeds
        ):
            found = train(folder, dtype, rate, steps, seed, device=device)
            record(f"share: {name(dtype)}, learning rate {rate:g}", seed, device, found)
        if not today or "cures" not in arguments.parts:
            return
        for (cure, run), seed in itertools.product(cures(folder, device), seeds):
            record(f"cure: {cure}", seed, device, run(seed))
        record("cure: DeepSpeed's bf16", 0, device, engine(folder, device))
        record("cure: float16 weights", 0, device, train(folder, torch.float16, RATE, 20, 0, device=device))


def name(dtype: torch.dtype) -> str:
    """Return a dtype's name, without torch."""
    return str(dtype).removeprefix("torch.")


def record(case, seed, device, metrics):
    """Record one run, and print a line."""
    state = "healthy" if metrics["expected"] == "whole" else "broken"
    observe.record("F9", state, metrics, case=case, seed=seed, device=device)
    print(
        f"{observe.era()} {case}, seed {seed}: predicted {metrics['predicted']:.4f}, first step "
        f"{metrics['first_step']:.4f}, changed {metrics['changed']} of {metrics['elements']}, accuracy "
        f"{metrics['accuracy_after']:.3f}, rewards {metrics['rewards']}, {metrics['expected']}: {metrics['said']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
