"""A class in numbers, without a server: learners' state files, merged.

For each lab: how many solved it, how many hints they read, which wrong fixes they tried, how many minutes it took. A
file that cannot be read, or is handed in twice, is named and left out; the others count.
"""

import collections
import dataclasses
import pathlib
import statistics
from collections.abc import Iterable

from failurelab_course.labs import progress as lab_state


@dataclasses.dataclass
class LabStatistics:
    """One lab over all learners.

    Attributes:
        learners: how many touched it.
        solved: how many solved it.
        with_solution: of these, who had looked at the solution before.
        hints: how often each number of hints was read, by those who solved it.
        wrong_fixes: how many learners tried each declared wrong fix.
        checks: median number of checks up to the first pass; None if nobody solved it.
        minutes: median minutes from the first touch to the first pass, by the clock; None if nobody solved it. Who
            changed the clock meanwhile, so that the pass came first, is not counted in it.
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
    """What came of all files: statistics for each lab that somebody touched, and why files were left out."""

    files: int
    labs: list[LabStatistics]
    left_out: list[str]


def merge(paths: Iterable[pathlib.Path]) -> Report:
    """Read state files, one a learner; folders stand for the *.json files in them, and in folders below them."""
    states, left_out, seen = [], [], {}
    for path in paths:
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not files:
            left_out.append(f"{path}: no *.json file is in it. Next: give the folder with the learners' files")
        for file in files:
            if file.resolve() in seen:
                continue
            try:
                state = _read(file)
            except lab_state.StateError as error:
                left_out.append(str(error))
                seen[file.resolve()] = None
                continue
            # Times are to the second: nobody else has the same.
            same = next((earlier for earlier, other in seen.items() if other and other == state), None)
            seen[file.resolve()] = state
            if same:
                left_out.append(f"{file}: it holds the same as {same}. Next: ask whose it is; it was counted once")
            else:
                states.append(state)
    names = sorted({name for state in states for name, progress in state.items() if progress.started})
    return Report(len(states), [_statistics(name, states) for name in names], left_out)


def _read(path: pathlib.Path) -> lab_state.State:
    """Return a learner's state.

    Raises:
        StateError: it is not there, or damaged; the message says the next step for whoever collects the files.
    """
    if not path.is_file():
        raise lab_state.StateError(f"{path}: it is not there. Next: check the name")
    try:
        return lab_state.read(path)
    except lab_state.StateError as error:
        problem = str(error).partition(". ")[0]
        raise lab_state.StateError(f"{problem}. Next: ask for the file again; the others are counted") from error


def _statistics(name: str, states: list[lab_state.State]) -> LabStatistics:
    touched = [state[name] for state in states if name in state and state[name].started]
    solved = [progress for progress in touched if progress.solved]
    minutes = [progress.minutes for progress in solved if progress.minutes >= 0]
    tried = collections.Counter(fix for progress in touched for fix in progress.wrong_fixes)
    return LabStatistics(
        lab=name,
        learners=len(touched),
        solved=len(solved),
        with_solution=sum(progress.solution_seen for progress in solved),
        hints=dict(sorted(collections.Counter(progress.hints for progress in solved).items())),
        wrong_fixes=dict(tried.most_common()),
        checks=statistics.median(progress.checks for progress in solved) if solved else None,
        minutes=round(statistics.median(minutes), 1) if minutes else None,
    )
