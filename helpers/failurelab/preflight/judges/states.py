"""Weights that the script puts into a model, of which the model takes none: their names are others than its own.

The names are compared, so it is the same for a cut model: its first layers are called as those of the whole one.

Upstream: torch's `Module.load_state_dict`; peft's `set_peft_model_state_dict`, which puts the adapter's name in.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from failurelab.preflight.answer import Finding, Quantity
from failurelab.preflight.training import StateLoad, Training

WEIGHTS = "weights"


def judge_states(training: Training) -> Iterator[Finding]:
    """Tell each model that the trainer uses, and that took none of the weights that the script loaded into it."""
    trainer = training.trainer
    functions = getattr(trainer, "reward_funcs", None)
    used = [trainer.model, getattr(trainer, "ref_model", None), *(functions if isinstance(functions, list) else ())]
    known = {id(tensor) for model in used if isinstance(model, torch.nn.Module) for tensor in model.parameters()}
    by_model: dict[int, list[StateLoad]] = {}
    for load in training.states:
        model = load.model()
        if model is not None and any(id(tensor) in known for tensor in model.parameters()):
            by_model.setdefault(id(model), []).append(load)
    for loads in by_model.values():
        # a script may look at what was passed over, and load it once more by other names
        yield _judge_load(max(loads, key=lambda load: len(load.taken)))


def _judge_load(load: StateLoad) -> Finding:
    count, taken = len(load.names), len(load.taken)
    said = f"load_state_dict(strict=False) was given {count} tensors, and the model has "
    if taken:
        own = set(load.own)
        planted = sum(f"_.{name}" in own for name in load.names)
        return Finding.held(WEIGHTS, f"{said}{taken} of their names", f"with another prefix it would have {planted}")
    other, how = _renamed(load.names, load.own)
    said += f"none of their names: all are passed over, and it stays as it was ({load.names[0]} is no name of it"
    hits = sum(name in set(load.own) for name in other)
    figures = (Quantity("tensors that were taken", 0, "", count),)
    if not hits:
        said += f"; its own are such as {load.own[0]})"
        why = "whether these weights belong to this model at all is not known"
        repair = "Look at what load_state_dict returns, or give it strict=True."
        return Finding.suspected(WEIGHTS, said, why, repair, figures=figures, place=load.place)
    said += f", {next(name for name in other if name in load.own)} is)"
    repair = f"Load them by the model's names, {how}, and look at what load_state_dict returns."
    if how.startswith("with the adapter"):
        repair = "Call peft.set_peft_model_state_dict(model, weights) in its place, which puts the adapter's name in."
    tried = f"{how} it has {hits} of {count} names"
    return Finding(WEIGHTS, said, repair, tried=tried, figures=figures, place=load.place)


def _renamed(names: Sequence[str], own: Sequence[str]) -> tuple[list[str], str]:
    """Return names as the model may have them, the ones that it has most of, and what was done to them, in words."""
    ways: list[tuple[list[str], str]] = []
    adapters = sorted({name.split(".")[-2] for name in own if ".lora_" in name and name.count(".") > 1})
    for adapter in adapters:
        ways.append(([_with_adapter(name, adapter) for name in names], "with the adapter's name in them"))
        ways.append(([name.replace(f".{adapter}.", ".") for name in names], "without the adapter's name"))
    for changed, how in [(list(names), ""), *ways]:
        first, its = changed[0], f"{how} and " * bool(how)
        for name in own:
            if name.endswith(f".{first}"):
                prefix = name[: -len(first)]
                ways.append(([prefix + other for other in changed], f"{its}with {prefix!r} before them"))
            if first.endswith(f".{name}"):
                prefix = first[: -len(name)]
                ways.append(([other.removeprefix(prefix) for other in changed], f"{its}without {prefix!r} before them"))
    there = set(own)
    best: Any = max(ways, key=lambda way: sum(name in there for name in way[0]), default=([], ""))
    return best


def _with_adapter(name: str, adapter: str) -> str:
    before, _, last = name.rpartition(".")
    return f"{before}.{adapter}.{last}" if ".lora_" in name and last == "weight" else name
