"""The figures that a trainer logged, from `trainer_state.json`, JSON lines, or the lines that a Trainer prints.

Half-written files are usual: a run dies while it writes. So a file is never parsed as a whole. It is read in blocks,
and each `{...}` without another one in it is looked at by itself; what has figures of a trainer is an entry. That also
bounds the memory for a file of hundreds of megabytes.
"""

import array
import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

Numbers: TypeAlias = "array.array[float]"  # which is a text, as before Python 3.12 an array takes no type

_OBJECT = re.compile(r"\{[^{}]*\}")
_PAIR = re.compile(
    r"""['"]([\w/. -]+)['"]\s*:\s*['"]?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|NaN|inf|Infinity))(?=['"\s,}])"""
)
_TAIL = 1 << 20  # characters that one entry may have
_TRAINING = {"loss", "reward", "grad_norm"}
_EVALUATION = {"eval_loss", "eval_reward", "train_runtime"}  # and the summary at the end
_LOGGED = {"loss", "reward", "grad_norm", "train_loss", "learning_rate", "eval_loss", "train_runtime"}
# What a figure is called in a log, and here; of names in several releases of trl the newest first.
_KNOWN = {name: name for name in ("reward", "reward_std", "grad_norm", "loss", "kl", "entropy", "learning_rate")} | {
    "frac_reward_zero_std": "zero_spread",
    "completions/clipped_ratio": "clipped",
    "clipped_ratio": "clipped",
    "completions/mean_length": "length",
    "completion_length": "length",
    "sampling/sampling_logp_difference/mean": "engine_gap",
    "sampling/sampling_logp_difference/max": "engine_gap_max",
    "sampling/importance_sampling_ratio/mean": "weight_mean",
    "sampling/importance_sampling_ratio/min": "weight_min",
}
# What only another trainer logs, and which.
_OTHERS = (
    ("rewards/chosen", "DPO"),
    ("logps/chosen", "DPO"),
    ("objective/rlhf_reward", "PPO or Online DPO"),
    ("objective/kl", "PPO or Online DPO"),
    ("policy/approxkl_avg", "PPO"),
    ("mean_token_accuracy", "SFT"),
)


@dataclasses.dataclass
class History:
    """What one run logged, by figure.

    Attributes:
        steps: of each entry.
        figures: name to one value an entry; NaN where the entry has none.
        invalid: name to the number of entries that say NaN or infinity.
        rewards: of each reward function, its values.
        entries: of training, in all.
        trainer: which other trainer wrote it; empty for GRPO.
        notes: what was strange, a line each.
        numbered: whether the entries say their steps.
        old_names: whether the figures have the names of trl 0.14 and 0.15: completion_length, and no clip_ratio.
    """

    steps: Numbers
    figures: dict[str, Numbers]
    invalid: dict[str, int]
    rewards: dict[str, Numbers]
    entries: int = 0
    trainer: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    numbered: bool = True
    old_names: bool = False

    def pairs(self, figure: str) -> tuple[list[float], list[float]]:
        """Return the steps and values of a figure where it is a number."""
        values = self.figures.get(figure, ())
        kept = [(step, value) for step, value in zip(self.steps, values) if math.isfinite(value)]
        return [step for step, _ in kept], [value for _, value in kept]


def entries_of(blocks: Iterable[str]) -> Iterator[dict[str, float]]:
    """Yield the logged figures of each entry in a text that comes in blocks."""
    rest = ""
    for block in blocks:
        rest += block
        end = 0
        for match in _OBJECT.finditer(rest):
            end = match.end()
            entry = _entry(match[0])
            if entry:
                yield entry
        rest = rest[end:][-_TAIL:]


def _entry(text: str) -> dict[str, float] | None:
    try:
        entry = {}
        for name, value in json.loads(text).items():
            if value is None and name in _KNOWN:
                entry[name] = math.nan
            elif type(value) in (int, float, str):
                with contextlib.suppress(ValueError, OverflowError):
                    entry[name] = float(value)
    except ValueError:
        entry = {name: float(value) for name, value in _PAIR.findall(text)}
    return None if _LOGGED.isdisjoint(entry) else entry


def read_history(entries: Iterable[dict[str, float]]) -> History:
    """Put entries in order: resumed runs joined, the last of several runs taken, steps sorted."""
    columns: dict[str, Numbers] = {}  # by logged name; NaN where an entry has none, infinity where it is no number
    names: set[str] = set()
    count = 0
    for entry in entries:
        names |= entry.keys()
        if _EVALUATION & entry.keys() or not _TRAINING & entry.keys():
            continue
        for name, value in entry.items():
            if name in _KNOWN or name == "step" or (name.startswith("rewards/") and not name.endswith("/std")):
                column = columns.setdefault(name, array.array("d"))
                column.extend(itertools.repeat(math.nan, count - len(column)))
                column.append(value if math.isfinite(value) else math.inf)
        count += 1
    for column in columns.values():
        column.extend(itertools.repeat(math.nan, count - len(column)))
    notes: list[str] = []
    order: list[int] | range = range(count)
    steps = columns.pop("step", array.array("d"))
    numbered = sum(map(math.isfinite, steps)) > count / 2
    if numbered:
        order = _ordered(steps, notes)
    else:
        steps = array.array("d", range(1, count + 1))
    trainer = ""
    if "reward" not in columns:
        trainer = next((trainer for name, trainer in _OTHERS if name in names), "another kind of" if count else "")
    figures: dict[str, Numbers] = {}
    for name, figure in _KNOWN.items():
        if name in columns and figure not in figures:
            figures[figure] = array.array("d", (columns[name][index] for index in order))
    invalid = {figure: sum(map(math.isinf, values)) for figure, values in figures.items()}
    rewards = {
        name.removeprefix("rewards/").removesuffix("/mean"): array.array("d", (column[index] for index in order))
        for name, column in sorted(columns.items())
        if name.startswith("rewards/")
    }
    old = "completion_length" in names and not any(name.startswith("clip_ratio") for name in names)
    kept = array.array("d", (steps[index] for index in order))
    return History(kept, figures, invalid, rewards, len(kept), trainer, notes, numbered, old)


def _ordered(steps: Numbers, notes: list[str]) -> list[int]:
    """Return which entries count, in the order of their steps; of a step that was logged again, the later one."""
    rows = [index for index, step in enumerate(steps) if math.isfinite(step)]
    back = [index for before, index in itertools.pairwise(rows) if steps[index] < steps[before]]
    if len(back) > 3 and len(back) > len(rows) / 20:
        notes.append("the entries were out of order: they were sorted by their steps")
        by_step = {steps[index]: index for index in rows}
        return [by_step[step] for step in sorted(by_step)]
    runs: list[list[int]] = [[]]
    resumed = 0
    for index in rows:
        kept = runs[-1]
        if kept and steps[index] < steps[kept[-1]]:
            if steps[index] <= steps[kept[0]]:
                runs.append([])
            else:
                resumed += 1
        while runs[-1] and steps[runs[-1][-1]] >= steps[index]:
            runs[-1].pop()
        runs[-1].append(index)
    if resumed:
        notes.append(f"the run was resumed {resumed} time{'s' * (resumed > 1)}: steps that were done again count once")
    if len(runs) > 1:
        notes.append(f"there are {len(runs)} runs in one log: the last is judged")
    return runs[-1]
