"""Updates that round to nothing: elements changed and reward, by dtype and learning rate, and each cure's curve.

Every run predicts the share of elements that its first step changes, measures it, and has an UpdateGuard on.

Eras: trl-0.14, today.
"""

import statistics
import tempfile
import warnings

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
    """Which share of the elements with a gradient each optimizer step changes."""

    def __init__(self):
        self.shares: list[float] = []

    def on_pre_optimizer_step(self, *_, model=None, **__):
        """Keep the weights."""
        self.before = [(p, p.detach().clone(), p.grad != 0) for p in model.parameters() if p.grad is not None]

    def on_optimizer_step(self, *_, **__):
        """Compare."""
        with_gradient = sum(int(moved.sum()) for *_, moved in self.before)
        changed = sum(int(((weights != before) & moved).sum()) for weights, before, moved in self.before)
        self.shares.append(changed / max(with_gradient, 1))


def train(folder, dtype, rate, steps, seed, *, trained="full", optimizer=None, device="cpu", **options):
    """Return what one run did, as metrics."""
    policy, tokenizer = models.load(folder, dtype=dtype, device=device)
    if trained != "full":
        from peft import LoraConfig, get_peft_model

        transformers.set_seed(seed)
        policy = get_peft_model(policy, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        if "bfloat16" in trained:
            policy.to(BF16)
    predicted = updates.share_that_changes(policy, rate)
    before = {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}
    shares, guard = Shares(), guards.UpdateGuard()
    trainer = trainers.grpo(
        policy, tokenizer, steps=steps, seed=seed, learning_rate=rate, callbacks=[shares, guard], **WORK, **options
    )
    if optimizer:
        trainer.optimizer = optimizer(policy, rate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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
        "accuracy_after": statistics.fmean(draws),
        "error": error,
        "finite": all(bool(torch.isfinite(p).all()) for p in after.values()),
        "alarm": any(issubclass(warning.category, guards.GuardWarning) for warning in caught),
        "lost": changed < 0.1 * predicted.elements,
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


def gap(folder, dtype, device):
    """Return the mean distance of the log-probabilities of right answers in this dtype from those in float32."""
    rows = []
    for each in (dtype, F32):
        policy, tokenizer = models.load(folder, dtype=each, device=device)
        texts = [f"{prompt}{answer}" for prompt, answer in models.sums() if len(f"{prompt}{answer}") == 7]
        ids = tokenizer(texts, return_tensors="pt")["input_ids"].to(device)
        with torch.no_grad():
            rows.append(policy(input_ids=ids).logits[:, -3:-1].float().log_softmax(-1).gather(2, ids[:, -2:, None]))
    return float((rows[0] - rows[1]).abs().mean())


def main() -> None:
    """Run all, record and print."""
    device = recording.begin(__doc__).device
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # the checkpoint as it would be on a hub: in bfloat16
        for part in models.load(dtype=BF16):
            part.save_pretrained(folder)
        for trained, dtype, rate, steps in GRID:
            for seed in range(SEEDS):
                record(f"{trained}, {name(dtype)}, learning rate {rate:g}", seed, device,
                       train(folder, dtype, rate, steps, seed, trained=trained, device=device))  # fmt: skip
        if observe.era() != "today":
            return
        for cure, run in cures(folder, device):
            for seed in range(SEEDS):
                record(f"cure: {cure}", seed, device, run(seed))
        record("cure: DeepSpeed's bf16", 0, device, engine(folder, device))
        record("cure: float16 weights", 0, device, train(folder, torch.float16, RATE, 20, 0, device=device))
        for dtype in (BF16, torch.float16):
            observe.record("F9", "measured", {"gap": gap(folder, dtype, device)}, case=f"gap to float32: {name(dtype)}")


def name(dtype: torch.dtype) -> str:
    """Return a dtype's name, without torch."""
    return str(dtype).removeprefix("torch.")


def record(case, seed, device, metrics):
    """Record one run, and print a line."""
    state = "broken" if metrics["lost"] else "healthy"
    observe.record("F9", state, metrics, case=case, seed=seed, device=device)
    print(
        f"{observe.era()} {case}, seed {seed}: predicted {metrics['predicted']:.4f}, first step "
        f"{metrics['first_step']:.4f}, changed {metrics['changed']} of {metrics['elements']}, accuracy "
        f"{metrics['accuracy_after']:.3f}, rewards {metrics['rewards']}, alarm {metrics['alarm']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
