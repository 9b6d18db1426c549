"""Every cure of "element 0": gradients, rollouts, reward, seconds, peak memory; alone, and with rollouts repaired.

LoRA and reentrant checkpointing in trl 0.14, three seeds. `curve` runs: 60 steps, accuracy before and after. `one step`
runs: peak memory of a whole training step, generation included, of a Qwen2 of 8 layers with random weights and 16
completions of 64 tokens; for DPOTrainer, which generates nothing, 8 pairs of the same length.

Eras: trl-0.14.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import recording
import torch
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


def deep(device: str) -> tuple[Any, Any]:
    """Return a Qwen2 of 8 layers with random weights, and the small model's tokenizer."""
    small, tokenizer = models.load(device=device)
    config = transformers.Qwen2Config(**small.config.to_dict() | {"num_hidden_layers": 8})
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config).to(device), tokenizer


def one_step(name: str, cure: Cure, seed: int, device: str) -> None:
    """Record peak memory of one training step."""
    policy, tokenizer = deep(device)
    trainer = trainer_of(
        cure,
        policy,
        tokenizer,
        seed,
        True,
        steps=1,
        prompts_per_step=2,
        max_completion_length=64,
        reward=lambda completions, **_: [float(index % 2) for index in range(len(completions))],
    )
    peak = observe.peak_memory(trainer.train, device) / 2**20
    record(f"one step: {name}", {"peak_mib": peak}, seed, device)


def dpo(policy: Any, tokenizer: Any, pairs: list, kind: str, seed: int, **more: Any) -> Any:
    """Return a DPOTrainer with the same adapter and checkpointing."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    transformers.set_seed(seed)
    config = DPOConfig(
        tempfile.mkdtemp(),
        learning_rate=2e-4,  # ten times less than GRPO: a loss that compares two fixed answers goes far at once
        lr_scheduler_type="constant",
        **recording.checkpointing(kind),
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=policy.device.type == "cpu",
        seed=seed,
        **more,
    )
    rows = Dataset.from_list(pairs)
    trainer = DPOTrainer(policy, args=config, train_dataset=rows, processing_class=tokenizer, peft_config=lora())
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def dpo_runs(seed: int, device: str) -> None:
    """Record DPOTrainer in place of GRPOTrainer: the right sum is preferred to the one above it."""
    for kind in ("reentrant", "off"):
        policy, tokenizer = models.load(device=device)
        before = models.accuracy(policy, tokenizer, sampled=True)
        pairs = [{"prompt": p, "chosen": a, "rejected": f"{int(a) + 1}"} for p, a in models.sums()]
        trainer = dpo(policy, tokenizer, pairs, kind, seed, max_steps=STEPS, per_device_train_batch_size=16)
        with observe.stopwatch(device) as seconds:
            report = recording.train_watched(trainer)
        metrics = report | {
            "seconds": seconds(),
            "accuracy_before": before,
            "accuracy_after": models.accuracy(trainer.model.eval(), tokenizer, sampled=True),
        }
        record(f"cure: DPOTrainer, {kind}", metrics, seed, device)
        policy, tokenizer = deep(device)
        pairs = [{"prompt": "12+13=", "chosen": "12" * 32, "rejected": "34" * 32} for _ in range(8)]
        trainer = dpo(policy, tokenizer, pairs, kind, seed, max_steps=1, per_device_train_batch_size=8)
        peak = observe.peak_memory(trainer.train, device) / 2**20
        record(f"one step: DPOTrainer, {kind}", {"peak_mib": peak}, seed, device)


def record(case: str, metrics: dict, seed: int, device: str) -> None:
    """Record, with the state that the metrics show."""
    state = "measured"  # of DPOTrainer too, which learns from fixed pairs and has no rollouts
    if "rewards" in metrics:
        whole = metrics["reached"] == metrics["trainable"]
        sane = bool(metrics["rewards"]) and metrics["rewards"][0] > metrics["accuracy_before"] - 0.08
        state = "broken" if not whole else "right_fix" if sane else "wrong_fix"
    observe.record("F2", state, metrics, case=case, seed=seed, device=device)
    print(seed, case, state, {key: value for key, value in metrics.items() if key != "steps"}, flush=True)


def main() -> None:
    """Run every cure with every seed."""
    arguments = recording.begin(__doc__, seeds=3)
    for seed in range(arguments.seeds):
        for name, cure in cures().items():
            for repair in (False, True):
                curve(name, cure, repair, seed, arguments.device)
        dpo_runs(seed, arguments.device)
    for name, cure in cures().items():
        if name != "nothing":
            one_step(name, cure, 0, arguments.device)


if __name__ == "__main__":
    main()
