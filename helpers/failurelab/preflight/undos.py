"""The undo of findings whose judges name none: looked up by the failure, from what the judge says is to be changed.

A judge's repair is often a piece of code in a sentence ("Set tokenizer.eos_token = '<|im_end|>' before the trainer is
made"), or one of few sentences about the function that it accuses. Here it becomes an object that can be tried.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch

from failurelab import updates
from failurelab.guards.reward import name_of
from failurelab.preflight.answers import Finding
from failurelab.preflight.inputs import Seen
from failurelab.preflight.judges.rows import prompt_ids, prompted, tokenizer_of
from failurelab.preflight.judges.updates import policy_load
from failurelab.preflight.repairs import AnyKeywords, Arguments, DotAll, FirstLine, Keyword, Repair, Statement
from failurelab.reward_functions.source import reference_column

_ROWS = 256
_ADD_MASK = """\
def add_mask(model, args, kwargs):
    ids = kwargs.get("input_ids", args[0] if args else None)
    mask = {{}} if ids is None else {{"attention_mask": (ids != {trainer}.processing_class.pad_token_id).long()}}
    return args, mask | kwargs
for each in filter(None, ({trainer}.model, {trainer}.ref_model)):
    each.register_forward_pre_hook(add_mask, with_kwargs=True)"""
_NUMBER = re.compile(r"Set ([a-z_]+)=(\d+)|Set ([a-z_]+) to what the answers need: (\d+)")
_TOKEN = re.compile(r"Set tokenizer\.(\w+ = (?:'[^']*'|\"[^\"]*\")) before the trainer is made")
_RENAMED = re.compile(r"Call the dataset's column '([^']+)'")
_UNDER = re.compile(r"with (\w+) under this name")


def with_undo(finding: Finding, seen: Seen) -> Finding:
    """Return a finding with what undoes it, where its judge has not said and something does."""
    if finding.undo is not None:
        return finding
    find = _FINDERS.get(finding.failure)
    undo = find(finding, seen) if find else None
    measure = _MEASURES.get(finding.failure)
    tried = finding.tried or (measure(finding, seen) if measure and undo is not None else "")
    return dataclasses.replace(finding, undo=undo, tried=tried)


def _dtype(finding: Finding, seen: Seen) -> Repair | None:
    """F9: the load in float32; a cast that came after the load is undone before training."""
    load = policy_load(seen)
    if load is None or load.dtype not in ("bfloat16", "float16"):
        return Statement("{trainer}.model.float()")
    name = "torch_dtype" if "torch_dtype=" in finding.repair or '"torch_dtype"' in finding.repair else "dtype"
    if load.by_trainer:
        return Arguments({"model_init_kwargs": {**(seen.asked.get("model_init_kwargs") or {}), name: "float32"}})
    return Keyword("load", name, '"float32"', index=next(i for i, each in enumerate(seen.loads) if each is load))


def _numbers(finding: Finding, seen: Seen) -> Repair | None:
    """F11, F20: a training argument with the number that the judge has counted."""
    found = _NUMBER.search(finding.repair)
    name, value = (found[1] or found[3], found[2] or found[4]) if found else (None, None)
    return Arguments({name: int(value)}) if name in seen.asked else None


def _token(finding: Finding, seen: Seen) -> Repair | None:
    """F13: the tokenizer's token, before the trainer is made."""
    found = _TOKEN.search(finding.repair)
    return Statement(f"{{tokenizer}}.{found[1]}", before="trainer") if found else None


def _mask(finding: Finding, seen: Seen) -> Repair | None:
    """F21 of trl 0.14: the attention mask that it leaves out of its scores (TRL #2708)."""
    return Statement(_ADD_MASK) if "no attention mask" in finding.evidence else None


def _reward(finding: Finding, seen: Seen) -> Repair | None:
    """F10, F14: the function that is accused, or the column that it asks for."""
    functions = getattr(seen.trainer, "reward_funcs", None) or []
    function: Any = next((each for each in functions if name_of(each) == finding.about), None)
    if function is None:
        return None
    if finding.repair.startswith("Add **kwargs"):
        return AnyKeywords(function)
    if finding.repair.startswith("Give the pattern re.DOTALL"):
        return DotAll(function)
    if "completion[0]" in finding.repair or "completion[-1]" in finding.repair:
        return FirstLine(function, "completions = [completion[-1]['content'] for completion in completions]")
    if finding.repair.startswith("Set remove_unused_columns=False"):
        return Arguments({"remove_unused_columns": False})
    name, source = _RENAMED.search(finding.repair), _UNDER.search(finding.tried)
    if name and source and source[1] != name[1]:
        return Keyword("trainer", "train_dataset", f"{{}}.rename_column({source[1]!r}, {name[1]!r})")
    return None


def _float32_share(finding: Finding, seen: Seen) -> str:
    """F9: what the same step changes of numbers in float32, spread as the configuration says."""
    load = policy_load(seen)
    spread = float(getattr(load and load.config, "initializer_range", None) or 0.02)
    numbers = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0), device="cpu") * spread
    share = updates.shares([("", numbers)], float(seen.asked["learning_rate"]), dtype=torch.float32).share
    return f"in float32 the same step changes {share:.1%} of numbers spread by {spread:g}"


def _still_longer(finding: Finding, seen: Seen) -> str:
    """F11: how many of the same prompts or answers are longer than the number that was counted."""
    found = _NUMBER.search(finding.repair)
    rows = prompted(seen, _ROWS)
    if not found or not rows:
        return ""
    if found[1] == "max_prompt_length":
        lengths = [len(ids) for ids in prompt_ids(seen.trainer, [row["prompt"] for row in rows])]
    else:
        column = reference_column(rows)
        texts = [row[column] for row in rows if isinstance(row.get(column), str)] if column else []
        lengths = [len(ids) for ids in tokenizer_of(seen.trainer)(texts, add_special_tokens=False)["input_ids"]]
    longer = sum(length > int(found[2] or found[4]) for length in lengths)
    return f"{longer} of {len(lengths)} are longer than {found[2] or found[4]}" if lengths else ""


_MEASURES: dict[str, Callable[[Finding, Seen], str]] = {"F9": _float32_share, "F11": _still_longer}
_FINDERS: dict[str, Callable[[Finding, Seen], Repair | None]] = {
    "F9": _dtype,
    "F10": _reward,
    "F11": _numbers,
    "F13": _token,
    "F14": _reward,
    "F20": _numbers,
    "F21": _mask,
}
