"""Every cure of "element 0": gradients, rollouts, reward, seconds; alone, and with rollouts repaired.

LoRA and reentrant checkpointing in trl 0.14, three seeds, 60 steps, accuracy before and after.

Eras: trl-0.14.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import frames
import recording
import transformers

from failurelab import gradients
from failurelab_course.experiments import models, observe, trainers

STEPS = 60
NAMES = (
    "checkpointing off",
    "nothing",
    "enable_input_require_grads before the wrap",
    "enable_input_require_grads after the wrap",
    "forward hook written out",
    "checkpointing before the wrap",
    "use_reentrant=False",
    "prepare_peft",
)


@dataclasses.dataclass
class Cure:
    """How a run is made: what is done to the model, and which checkpointing the trainer is asked for."""

    prepare: Callable[[Any], Any] = lambda model: model
    kind: str = "reentrant"


def lora() -> Any:
    """Return the adapter that every run trains."""
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def cures() -> dict[str, Cure]:
    """Return all cures by name."""
    from peft import get_peft_model

    def before(model: Any) -> Any:
        model.enable_input_require_grads()
        return model

    def after(model: Any) -> Any:
        wrapped = get_peft_model(model, lora())
        wrapped.enable_input_require_grads()
        return wrapped

    def hook(model: Any) -> Any:
        model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_(True))
        return model

    def first(model: Any) -> Any:
        gradients.enable_checkpointing(model)
        return model

    recipes = (
        Cure(kind="off"),
        Cure(),
        Cure(before),
        Cure(after),
        Cure(hook),
        Cure(first),
        Cure(kind="non-reentrant"),
        Cure(lambda model: gradients.prepare_peft(model, lora())),
    )
    return dict(zip(NAMES, recipes, strict=True))


def trainer_of(cure: Cure, policy: Any, tokenizer: Any, seed: int, repair: bool, **more: Any) -> Any:
    """Return a GRPOTrainer with this cure; `repair` makes its generation do without the cache (F7)."""
    transformers.set_seed(seed)  # an adapter's weights are drawn here, or in the trainer, which seeds alike
    policy = cure.prepare(policy)
    trainer = trainers.grpo(
        policy,
        tokenizer,
        seed=seed,
        learning_rate=2e-3,
        peft_config=None if hasattr(policy, "get_base_model") else lora(),
        **recording.checkpointing(cure.kind),
        **more,
    )
    if repair:
        trainer.generation_config.use_cache = False
    return trainer


def curve(name: str, cure: Cure, repair: bool, seed: int, device: str) -> None:
    """Record a run of 60 steps."""
    policy, tokenizer = models.load(device=device)
    before = models.accuracy(policy, tokenizer, sampled=True)
    trainer = trainer_of(cure, policy, tokenizer, seed, repair, steps=STEPS)
    with observe.stopwatch(device) as seconds:
        report = recording.train_watched(trainer)
    steps, rewards = trainers.curve(trainer)
    metrics = report | {
        "seconds": seconds(),
        "accuracy_before": before,
        "accuracy_after": models.accuracy(trainer.model, tokenizer, sampled=True),
        "steps": steps,
        "rewards": [round(reward, 4) for reward in rewards],
    }
    record(f"cure: {name}{', rollouts repaired' if repair else ''}", metrics, seed, device)


def record(case: str, metrics: dict, seed: int, device: str) -> None:
    """Record, with the state that the metrics show."""
    whole = metrics["reached"] == metrics["trainable"]
    sane = bool(metrics["rewards"]) and metrics["rewards"][0] > metrics["accuracy_before"] - 0.08
    state = "broken" if not whole else "right_fix" if sane else "wrong_fix"
    observe.record("F2", state, metrics, case=case, seed=seed, device=device)
    print(seed, case, state, {key: value for key, value in metrics.items() if key != "steps"}, flush=True)


def table_cures(folder: pathlib.Path) -> str:
    """Every cure of "element 0": gradients, rewards alone and with the rollouts repaired."""
    body = []
    runs = frames.read_runs(folder, "peft_cures", "cure: (?P<name>.+?)(?P<repair>, rollouts repaired)?")
    for name, group in runs.groupby("name"):
        alone, both = group[group["repair"].isna()], group[group["repair"].notna()]
        ends = (frames.spread(part[end], missing="-") for part in (alone, both) for end in ("first", "last"))
        gradients = f"{alone['reached'].min()} of {alone['trainable'].iloc[0]}"
        accuracy = frames.spread((alone if both.empty else both)["accuracy_after"])
        body.append([name, gradients, *ends, accuracy])
    head = ["cure", "tensors with a gradient", "reward, first 10 steps", "last 10"]
    return frames.markdown([*head, "rollouts repaired too: first 10", "last 10", "accuracy after"], frames.fold(body))


def main() -> None:
    """Run every cure with every seed."""
    arguments = recording.begin(__doc__, seeds=3)
    for seed in range(arguments.seeds):
        for name, cure in cures().items():
            for repair in (False, True):
                curve(name, cure, repair, seed, arguments.device)


if __name__ == "__main__":
    main()
