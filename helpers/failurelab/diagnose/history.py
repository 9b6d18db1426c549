"""The figures that a trainer logged, from `trainer_state.json`, JSON lines, or the lines that a Trainer prints.

Half-written files are usual: a run dies while it writes. So a file is never parsed as a whole. It is read in blocks,
and each `{...}` without another one in it is looked at by itself; what has figures of a trainer is an entry. That also
bounds the memory for a file of hundreds of megabytes.
"""

import array
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator

_OBJECT = re.compile(r"\{[^{}]*\}")
_PAIR = re.compile(
    r"""['"]([\w/. -]+)['"]\s*:\s*['"]?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|NaN|inf|Infinity))(?=['"\s,}])"""
)
_TAIL = 1 << 20  # characters that one entry may have
_LOGGED = {"loss", "reward", "grad_norm", "train_loss", "learning_rate", "eval_loss", "train_runtime"}
# Names that a figure has had in releases of trl, the newest first.
NAMES = {
    "reward": ("reward",),
    "reward_std": ("reward_std",),
    "zero_spread": ("frac_reward_zero_std",),
    "grad_norm": ("grad_norm",),
    "loss": ("loss",),
    "kl": ("kl",),
    "entropy": ("entropy",),
    "learning_rate": ("learning_rate",),
    "clipped": ("completions/clipped_ratio", "clipped_ratio"),
    "length": ("completions/mean_length", "completion_length"),
    "length_max": ("completions/max_length",),
    "length_min": ("completions/min_length",),
    "length_ended": ("completions/mean_terminated_length",),
    "engine_gap": ("sampling/sampling_logp_difference/mean",),
    "engine_gap_max": ("sampling/sampling_logp_difference/max",),
    "weight_mean": ("sampling/importance_sampling_ratio/mean",),
    "weight_min": ("sampling/importance_sampling_ratio/min",),
    "weight_max": ("sampling/importance_sampling_ratio/max",),
    "clip_ratio": ("clip_ratio/region_mean", "clip_ratio"),
    "num_tokens": ("num_tokens",),
}
_KNOWN = {name: figure for figure, names in NAMES.items() for name in names}
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

    steps: array.array
    figures: dict[str, array.array]
    invalid: dict[str, int]
    rewards: dict[str, array.array]
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
        read = json.loads(text)
        entry = {}
        for name, value in read.items():
            if type(value) in (int, float):
                entry[name] = value
            elif isinstance(value, str):
                try:
                    entry[name] = float(value)
                except ValueError:
                    continue
            elif value is None and name in _KNOWN:
                entry[name] = math.nan
    except ValueError:
        entry = {name: float(value) for name, value in _PAIR.findall(text)}
    if not _LOGGED.isdisjoint(entry):
        return entry
    return None


def read_history(entries: Iterable[dict[str, float]]) -> History:
    """Put entries in order: resumed runs joined, the last of several runs taken, steps sorted."""
    rows, notes, functions = [], [], set()
    names: set[str] = set()
    for entry in entries:
        names |= entry.keys()
        if "loss" not in entry and "reward" not in entry and "grad_norm" not in entry:
            continue  # an evaluation, or the summary at the end
        if "eval_loss" in entry or "eval_reward" in entry or "train_runtime" in entry:
            continue
        functions |= {name for name in entry if name.startswith("rewards/") and not name.endswith("/std")}
        rows.append(entry)
    numbered = bool(rows) and sum("step" in row for row in rows) > len(rows) / 2
    if numbered:
        rows = [row for row in rows if "step" in row and math.isfinite(row["step"])]
        rows = _ordered(rows, notes)
    trainer = ""
    if not any("reward" in row for row in rows):
        trainer = next((trainer for name, trainer in _OTHERS if name in names), "another" if rows else "")
    steps = array.array("d", (row["step"] if numbered else index + 1 for index, row in enumerate(rows)))
    figures, invalid = {}, {}
    for name, figure in _KNOWN.items():
        if figure in figures or not any(name in row for row in rows):
            continue
        figures[figure] = array.array("d", (row.get(name, math.nan) for row in rows))
        invalid[figure] = sum(1 for row in rows if name in row and not math.isfinite(row[name]))
    rewards = {
        name.removeprefix("rewards/").removesuffix("/mean"): array.array("d", (row.get(name, math.nan) for row in rows))
        for name in sorted(functions)
    }
    old = "completion_length" in names and not any(name.startswith("clip_ratio") for name in names)
    return History(steps, figures, invalid, rewards, len(rows), trainer, notes, numbered, old)


def _ordered(rows: list[dict[str, float]], notes: list[str]) -> list[dict[str, float]]:
    breaks = [index for index in range(1, len(rows)) if rows[index]["step"] <= rows[index - 1]["step"]]
    if not breaks:
        return rows
    repeated = sum(rows[index]["step"] == rows[index - 1]["step"] for index in breaks)
    if len(breaks) > 3 and len(breaks) - repeated > len(rows) / 20:
        notes.append("the entries were out of order: they were sorted by their steps")
        by_step = {row["step"]: row for row in rows}
        return [by_step[step] for step in sorted(by_step)]
    runs: list[list[dict[str, float]]] = [[]]
    first = rows[0]["step"]
    resumed = 0
    for row in rows:
        kept = runs[-1]
        if kept and row["step"] < kept[-1]["step"]:
            if row["step"] <= max(first, kept[0]["step"]):
                runs.append([])
            else:
                resumed += 1
                while kept and kept[-1]["step"] >= row["step"]:
                    kept.pop()
        elif kept and row["step"] == kept[-1]["step"]:
            kept[-1] = kept[-1] | row
            continue
        runs[-1].append(row)
    if resumed:
        notes.append(f"the run was resumed {resumed} time{'s' * (resumed > 1)}: steps that were done again count once")
    if len(runs) > 1:
        notes.append(f"there are {len(runs)} runs in one log: the last is judged")
    return runs[-1]
