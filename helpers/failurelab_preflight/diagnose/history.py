"""The figures that a trainer logged: `trainer_state.json`, JSON lines, printed dicts, or a table in CSV.

Half-written files are usual: a run dies while it writes. So a file is never parsed as a whole. It is read in blocks,
and each `{...}` without another one in it is looked at by itself; what has figures of a trainer is an entry.
"""

import contextlib
import csv
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Entry = dict[str, float]

_OBJECT = re.compile(r"\{[^{}]*\}")
_PAIR = re.compile(
    r"""['"]([\w/. -]+)['"]\s*:\s*['"]?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|NaN|inf|Infinity))(?=['"\s,}])"""
)
_TAIL = 1 << 20  # characters that one entry may have
_TRAINING = {"loss", "reward", "grad_norm"}
_EVALUATION = {"eval_loss", "eval_reward", "train_runtime"}  # and the summary at the end
_LOGGED = _TRAINING | _EVALUATION | {"train_loss", "learning_rate"}
# What a figure is called in a log, and here; of names in several releases of trl the newest first.
_KNOWN = {name: name for name in ("reward", "reward_std", "grad_norm", "loss", "kl", "learning_rate", "step")} | {
    "global_step": "step",
    "_step": "step",
    "Step": "step",
    "frac_reward_zero_std": "zero_spread",
    "completions/clipped_ratio": "clipped",
    "clipped_ratio": "clipped",
    "completions/mean_length": "length",
    "completion_length": "length",
    "sampling/sampling_logp_difference/mean": "engine_gap",
    "sampling/importance_sampling_ratio/mean": "weight_mean",
    "sampling/importance_sampling_ratio/max": "weight_max",
}


@dataclasses.dataclass
class History:
    """What one run logged.

    Attributes:
        entries: of training, in the order of their steps: step and figures, as they are called here; NaN or infinity
            where that was logged.
        grpo: whether a trainer with rewards logged it: GRPO's, or one like it.
        notes: what was done to bring the entries into order.
        numbered: whether the entries say their steps; else they are counted.
    """

    entries: list[Entry]
    grpo: bool = True
    notes: list[str] = dataclasses.field(default_factory=list)
    numbered: bool = True

    def pairs(self, figure: str) -> tuple[list[float], list[float]]:
        """Return the steps and values of a figure where it is a number."""
        kept = [entry for entry in self.entries if math.isfinite(entry.get(figure, math.nan))]
        return [entry["step"] for entry in kept], [entry[figure] for entry in kept]

    def share_invalid(self, figure: str) -> float:
        """Return the share of the entries that say NaN or infinity."""
        return sum(not math.isfinite(entry.get(figure, 0.0)) for entry in self.entries) / max(1, len(self.entries))


def entries_of(blocks: Iterable[str]) -> Iterator[Entry]:
    """Yield the logged figures of each entry in a text that comes in blocks."""
    rest = ""
    for block in blocks:
        rest += block
        end = 0
        for match in _OBJECT.finditer(rest):
            end = match.end()
            yield from _entry(match[0])
        rest = rest[end:][-_TAIL:]


def rows_of(lines: Iterable[str]) -> Iterator[Entry]:
    """Yield the logged figures of each row of a CSV: as wandb exports a run's history, or the panel of one figure."""
    for row in csv.DictReader(lines):
        named = {(name or "").rpartition(" - ")[2]: value for name, value in row.items()}
        entry = _numbers({name.removeprefix("train/"): value for name, value in named.items() if value})
        if not _LOGGED.isdisjoint(entry):
            yield entry


def _entry(text: str) -> Iterator[Entry]:
    try:
        entry = _numbers({name.removeprefix("train/"): value for name, value in json.loads(text).items()})
    except ValueError:
        entry = {name: float(value) for name, value in _PAIR.findall(text)}
    if not _LOGGED.isdisjoint(entry):
        yield entry


def _numbers(values: Mapping[str, Any]) -> Entry:
    entry = {}
    for name, value in values.items():
        if value is None and name in _KNOWN:
            entry[name] = math.nan
        elif type(value) in (int, float, str):
            with contextlib.suppress(ValueError, OverflowError):
                entry[name] = float(value)
    return entry


def read_history(logged: Iterable[Entry]) -> History:
    """Put entries in order: resumed runs joined, the last of several runs taken, steps sorted."""
    entries: list[Entry] = []
    for raw in logged:
        if _EVALUATION & raw.keys() or not _TRAINING & raw.keys():
            continue
        entry: Entry = {}
        for name, figure in _KNOWN.items():
            if name in raw:
                entry.setdefault(figure, raw[name])
        entries.append(entry)
    history = History(entries, not entries or any("reward" in entry for entry in entries))
    history.numbered = sum("step" in entry for entry in entries) > len(entries) / 2
    if history.numbered:
        history.entries = _ordered([entry for entry in entries if "step" in entry], history.notes)
    else:
        history.entries = [entry | {"step": float(number)} for number, entry in enumerate(entries, 1)]
    return history


def _ordered(entries: list[Entry], notes: list[str]) -> list[Entry]:
    """Return the entries that count, in the order of their steps; of a step that was logged again, the later one."""
    runs: list[list[Entry]] = [[]]
    resumed = 0
    for entry in entries:
        kept = runs[-1]
        if kept and entry["step"] < kept[-1]["step"]:
            if entry["step"] <= kept[0]["step"]:
                runs.append([])
            else:
                resumed += 1
        while runs[-1] and runs[-1][-1]["step"] >= entry["step"]:
            runs[-1].pop()
        runs[-1].append(entry)
    if resumed:
        notes.append(f"the run was resumed {resumed} time{'s' * (resumed > 1)}: steps that were done again count once")
    if len(runs) > 1:
        notes.append(f"there are {len(runs)} runs in one log: the last is judged")
    return runs[-1]
