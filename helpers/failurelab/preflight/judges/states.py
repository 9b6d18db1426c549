"""Weights that the script puts into a model, of which the model takes none: their names are others than its own.

And weights that it saves after training, and that are not the trained ones.

The names are compared, so it is the same for a cut model: its first layers are called as those of the whole one.

Upstream: torch's `Module.load_state_dict`; peft's `set_peft_model_state_dict`, which puts the adapter's name in.
"""

import ast
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from failurelab.preflight.answer import Finding, Quantity
from failurelab.preflight.script_text import location
from failurelab.preflight.training import StateLoad, Training

WEIGHTS = "weights"
_SAVES = ("save_pretrained", "save_model", "push_to_hub")


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


def judge_saved(training: Training) -> Iterator[Finding]:
    """Tell what is saved after training and is not the trained model, by the script's text: nothing of it is run.

    `merge_and_unload()` returns the merged model, and leaves the other without its adapter. A model that was given to
    the trainer has the adapter's layers inside, under names that no load of it knows.
    """
    source, model, given = training.source, training.trainer.model, training.keywords.get("model")
    if source is None or not source.line or not hasattr(model, "peft_config"):
        return
    inside = given is not model and any(part is given for part in model.modules())
    nodes = list(ast.walk(ast.parse(source.text)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    given_as = {ast.unparse(keyword.value) for call in calls for keyword in call.keywords if keyword.arg == "model"}
    later: dict[int, tuple[str, str]] = {}  # by line: what a method is called of, and which
    for call in calls:
        if call.lineno > source.line and isinstance(call.func, ast.Attribute):
            later[call.lineno] = ast.unparse(call.func.value), call.func.attr
    unused = {node.lineno for node in nodes if isinstance(node, ast.Expr)}
    anew = {
        ast.unparse(node.targets[0]) for node in nodes if isinstance(node, ast.Assign) and node.lineno > source.line
    }
    for line, (what, method) in sorted(later.items()):
        after = [
            at for at, (other, name) in later.items() if name in _SAVES and at > line and other in (what, "trainer")
        ]
        if method == "merge_and_unload" and line in unused and after:
            said = f"{what}.merge_and_unload() returns the merged model, which is dropped; what is saved in line "
            said += f"{min(after)} has no adapter any more"
            repair = f"merged = {what}.merge_and_unload(), and save merged."
        elif method == "save_pretrained" and inside and what in given_as - anew:
            said = (
                f"{what} has the adapter's layers inside when it is saved: names such as q_proj.base_layer.weight are "
            )
            said += "none that a load of this model knows, and what it lacks then is made anew, at random"
            repair = "Save the trainer's model: trainer.save_model(folder), or its merged one."
        else:
            continue
        place = location(source.path, line, source.text)
        why = "by the script's text: what comes after train() is not run"
        yield Finding.suspected(WEIGHTS, f"{said} ({place})", why, repair, part="saved", place=place)


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
