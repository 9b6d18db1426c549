"""Checkpointing that comes back reentrant: frozen embeddings, by release of trl, by what was asked for, and by cure.

From trl 0.22 generation runs with checkpointing switched off. Up to 0.25 it is switched on again without its arguments.

Eras: trl-0.14, trl-0.15, trl-0.22, today.
"""

import pathlib
import tempfile

import frames
import recording
import trl

from failurelab import gradients
from failurelab._checkpointing import option_name
from failurelab_course.experiments import models, observe, trainers

WARNING = "None of the inputs have requires_grad"


def asked_for() -> dict[str, dict]:
    """Return the ways to ask for checkpointing; `default` is what GRPOConfig of this release chooses by itself."""
    with tempfile.TemporaryDirectory() as folder:
        default = getattr(trl.GRPOConfig(folder, use_cpu=True), option_name())
    kinds = {kind: recording.checkpointing(kind) for kind in ("reentrant", "non-reentrant", "off")}
    return {"default": {"gradient_checkpointing": default}} | kinds


def run(options: dict, prepare, device: str) -> dict:
    """Train three steps with frozen embeddings; return how many tensors changed, and the checkpointing in force."""
    policy, tokenizer = models.load(device=device)
    policy.get_input_embeddings().requires_grad_(False)
    prepare(policy)
    trainer = trainers.grpo(policy, tokenizer, steps=3, learning_rate=1e-3, prompts_per_step=4, **options)
    before = gradients.snapshot(trainer.model)
    with observe.count_warnings(WARNING) as seen:
        trainer.train()
    kinds = sorted({kind for kind, _ in gradients.checkpointed(trainer.model)})
    changed = len(before.changed(trainer.model))
    return {"changed": changed, "trainable": len(before), "in_force": ", ".join(kinds) or "off", "warnings": seen.count}


def table_comes_back(folder: pathlib.Path) -> str:
    """Frozen embeddings, no adapter: tensors that change in three steps, by what was asked for, cure and release."""
    eras = ("trl-0.14", "trl-0.22", "today")  # trl-0.15 is as trl-0.14
    runs = frames.read_runs(folder, "reentrant_comes_back", "comes back, (?P<asked>.+)")
    head = ["asked for, or cure beside reentrant", *frames.version_heads(runs, eras, "trl", "transformers")]
    asked = list(dict.fromkeys(runs["asked"]))
    return frames.grid(head, runs, lambda run: f"{frames.changed(run)}, {run['in_force']}", asked=asked, era=eras)


def main() -> None:
    """Run what can be asked for, then each cure beside reentrant checkpointing, and record all."""
    device = recording.begin(__doc__).device
    runs = {f"asked for: {name}": (options, lambda policy: None) for name, options in asked_for().items()}
    cures = {
        "model.enable_input_require_grads()": lambda policy: policy.enable_input_require_grads(),
        "gradients.require_input_grads(model)": gradients.require_input_grads,
        "model.config.use_cache = False": lambda policy: setattr(policy.config, "use_cache", False),
    }
    runs |= {f"cure: {name}": (recording.checkpointing("reentrant"), prepare) for name, prepare in cures.items()}
    for case, (options, prepare) in runs.items():
        found = run(options, prepare, device)
        learns = found["changed"] == found["trainable"]
        fixed, broken = ("right_fix", "wrong_fix") if case.startswith("cure") else ("healthy", "broken")
        observe.record("F1", fixed if learns else broken, found, case=f"comes back, {case}", seed=0, device=device)
        print(case, found)


if __name__ == "__main__":
    main()
