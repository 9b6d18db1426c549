"""Resuming: where a run begins. Of the checkpoint the folder is looked at, and nothing is loaded from it.

Upstream: transformers `Trainer.train(resume_from_checkpoint=...)` and `get_last_checkpoint`.
"""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from failurelab._unwrap import has_adapter
from failurelab_preflight.answer import Finding
from failurelab_preflight.judges.plan import planned_steps
from failurelab_preflight.judges.updates import policy_load
from failurelab_preflight.training import Training

RESUME = "resume"
_SAME = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")  # of two configurations


def judge_resume(training: Training) -> Iterator[Finding]:
    """Look at the folder that training goes on from."""
    asked, output = training.resume, str(training.arguments.get("output_dir") or "")
    if not asked:
        if training.arguments.get("resume_from_checkpoint"):
            said = "resume_from_checkpoint is an argument of the config alone, and no Trainer reads it there"
            why = "train() begins anew, if nothing else in the script gives it on"
            repair = "Give it to the call: trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)."
            yield Finding.suspected(RESUME, said, why, repair)
            return
        yield Finding.not_applicable(RESUME, "training begins anew")
        return
    folder = _last_checkpoint(output) if asked is True else pathlib.Path(str(asked))
    if folder is None or not folder.is_dir():
        what = f"{output or 'output_dir'} has no checkpoint" if asked is True else f"{asked} is not there"
        said = f"training is to go on from a checkpoint, and {what} (from {os.getcwd()}): transformers ends in an error"
        why = "it may lie on the machine that trains"
        yield Finding.suspected(RESUME, said, why, "Resume only where a checkpoint is there: get_last_checkpoint.")
        return
    if faults := list(_faults(training, folder)):
        said, why = f"{folder}: {'; '.join(faults)}", "by its files alone; nothing was loaded from it"
        yield Finding.suspected(RESUME, said, why, "Give a checkpoint that this script's own run has saved.")
        return
    why = f"{folder} is of this model and trainer by its files; whether they load, and what is skipped, is not tried"
    yield Finding.not_checked(RESUME, why)


def _last_checkpoint(output: str) -> pathlib.Path | None:
    """Return the last checkpoint of a folder, as transformers finds it."""
    folders = pathlib.Path(output).glob("checkpoint-*") if output else ()
    numbered = [folder for folder in folders if folder.is_dir() and folder.name.rpartition("-")[2].isdigit()]
    return max(numbered, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def _faults(training: Training, folder: pathlib.Path) -> Iterator[str]:
    """Yield why a folder is no checkpoint of this model and trainer."""
    state = _read(folder / "trainer_state.json")
    if state is None:
        yield "it has no trainer_state.json that can be read, so it is no checkpoint of a Trainer"
        return
    steps, done = planned_steps(training), state.get("global_step")
    if steps and isinstance(done, int) and done >= steps:
        yield f"it is of step {done}, and about {steps} are planned: the run ends at once"
    adapter, config = _read(folder / "adapter_config.json"), _read(folder / "config.json")
    if has_adapter(training.trainer.model) and adapter is None:
        yield "the model has adapters, and it has no adapter_config.json"
    elif adapter is not None and not has_adapter(training.trainer.model):
        yield "it holds an adapter, and the model has none"
    load = policy_load(training)
    if config is not None and load is not None:
        pairs = {name: (config.get(name), getattr(load.config, name, None)) for name in _SAME}
        other = [f"{name} {theirs} and not {own}" for name, (theirs, own) in pairs.items() if theirs and own != theirs]
        if other:
            yield f"it is of another model: {', '.join(other)}"
    if adapter is not None:
        own = next(iter(getattr(training.trainer.model, "peft_config", {}).values()), None)
        rank = getattr(own, "r", None)
        if rank and adapter.get("r") and adapter["r"] != rank:
            yield f"its adapter has r={adapter['r']}, and the model's has r={rank}"


def _read(file: pathlib.Path) -> dict[str, Any] | None:
    """Return what a JSON file holds; None where there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
