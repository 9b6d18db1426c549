"""A class in numbers, without a server: learners' state files, merged.

For each lab: how many solved it, how many hints they read, which wrong fixes they tried, how many minutes it took. A
file that cannot be read is named and left out; the others count.
"""

import collections
import dataclasses
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

from . import lab_state, labs


@dataclasses.dataclass
class LabStatistics:
    """One lab over all learners.

    Attributes:
        lab: its name.
        learners: who touched it.
        solved: who solved it.
        with_solution: of these, who had looked at the solution before.
        hints: how often each number of hints was read, by those who solved it.
        wrong_fixes: how many learners tried each declared wrong fix.
        checks: median number of checks up to the first pass; None if nobody solved it.
        minutes: median minutes from the first touch to the first pass, by the clock; None if nobody solved it.
    """

    lab: str
    learners: int
    solved: int
    with_solution: int
    hints: dict[int, int]
    wrong_fixes: dict[str, int]
    checks: float | None
    minutes: float | None


@dataclasses.dataclass
class Report:
    """What came of all files: statistics for each lab, and why files were left out."""

    files: int
    labs: list[LabStatistics]
    left_out: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {"schema": 1, **dataclasses.asdict(self)}


def merge(paths: Iterable[pathlib.Path]) -> Report:
    """Read state files, one a learner; folders stand for the *.json files in them."""
    states, left_out = [], []
    for path in _files(paths):
        try:
            if not path.is_file():
                raise lab_state.StateError(f"{path}: it is not there. Next: check the name")
            states.append(lab_state.read(path))
        except lab_state.StateError as error:
            left_out.append(str(error))
    names = sorted({*labs.known(), *(name for state in states for name in state)})
    return Report(len(states), [_statistics(name, states) for name in names], left_out)


def _files(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    found = [each for path in paths for each in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    return list(dict.fromkeys(found))


def _statistics(name: str, states: list[lab_state.State]) -> LabStatistics:
    touched = [state[name] for state in states if name in state and state[name].started]
    solved = [each for each in touched if each.solved]
    tried = collections.Counter(fix for each in touched for fix in each.wrong_fixes)
    return LabStatistics(
        lab=name,
        learners=len(touched),
        solved=len(solved),
        with_solution=sum(each.solution_seen for each in solved),
        hints=dict(sorted(collections.Counter(each.hints for each in solved).items())),
        wrong_fixes=dict(tried.most_common()),
        checks=statistics.median(each.checks for each in solved) if solved else None,
        minutes=round(statistics.median(each.minutes for each in solved), 1) if solved else None,
    )
