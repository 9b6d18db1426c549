"""What a learner has done in the labs, in one small file: `.course/labs.json`, or where FAILURELAB_STATE says.

It holds no code and no name, only counts and times, so that it can be handed to a teacher (`failurelab lab report`).
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import pydantic

from failurelab.errors import FailureLabError
from failurelab_course import eras, state_file

SCHEMA = 1


class StateError(FailureLabError):
    """A state file cannot be read; the message names it and the next step."""


def _must_be_a_time(text: str) -> str:
    if text and datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text!r} is a time without a zone")
    return text


_Time = Annotated[str, pydantic.AfterValidator(_must_be_a_time)]


@dataclasses.dataclass
class Progress:
    """One lab, as one learner did it.

    Attributes:
        started: when it was first touched, ISO 8601 in UTC, or empty.
        solved: when a check first passed, or empty.
        checks: how many checks there were up to the first that passed.
        hints: how many hints were read before it was solved.
        wrong_fixes: declared wrong fixes that were tried, in order, each once.
        solution_seen: the solution was looked at before it was solved.
    """

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True)

    started: _Time = ""
    solved: _Time = ""
    checks: int = 0
    hints: int = 0
    wrong_fixes: list[str] = dataclasses.field(default_factory=list)
    solution_seen: bool = False

    @property
    def minutes(self) -> float | None:
        """Minutes from the first touch to the first pass, by the clock; None if it is not solved."""
        if not self.started or not self.solved:
            return None
        started, solved = map(datetime.datetime.fromisoformat, (self.started, self.solved))
        return (solved - started).total_seconds() / 60

    @property
    def words(self) -> str:
        """In a word: what a list shows."""
        if self.solved:
            return "solved, the solution was seen" if self.solution_seen else "solved"
        return f"tried, {self.checks} checks" if self.checks else "begun" if self.started else "-"


State = dict[str, Progress]


def default_path() -> pathlib.Path:
    """Return where this learner's state is kept."""
    named = os.environ.get("FAILURELAB_STATE")
    return pathlib.Path(named) if named else eras.root() / ".course" / "labs.json"


def read(path: pathlib.Path) -> State:
    """Return the state in a file, by lab; an absent file is an empty one.

    Raises:
        StateError: it is no state file, or is damaged.
    """
    content = state_file.read(path, lambda why: _broken(path, why))
    if content is None:
        return {}
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("labs"), dict):
        raise _broken(path, f"it is no state file of schema {SCHEMA}")
    try:
        return pydantic.TypeAdapter(State).validate_json(json.dumps(content["labs"]))
    except pydantic.ValidationError as errors:
        first = errors.errors()[0]
        raise _broken(path, f"{' '.join(map(str, first['loc']))}: {first['msg']}") from errors


def _broken(path: pathlib.Path, problem: str) -> StateError:
    return StateError(
        f"{path}: {problem}. Your scripts are not in it, only which labs are solved. Next: move it away, and it is "
        "begun anew"
    )


@contextlib.contextmanager
def change(name: str) -> Iterator[Progress]:
    """Give one lab's progress to be changed, and write the file whole when the block is left, error or not.

    Two commands at once do not lose each other's changes: the file is locked meanwhile.

    Raises:
        StateError: the file is damaged; it is left as it is.
    """
    path = default_path()
    with state_file.locked(path):
        state = read(path)
        progress = state.setdefault(name, Progress())
        progress.started = progress.started or now()
        try:
            yield progress
        finally:
            state_file.write(path, to_json(state))


def to_json(state: State) -> str:
    """Return a state as its file holds it."""
    labs: dict[str, Any] = {name: dataclasses.asdict(progress) for name, progress in sorted(state.items())}
    return json.dumps({"schema": SCHEMA, "labs": labs}, indent=1) + "\n"


def now() -> str:
    """Return this moment, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
