"""A list of things that were looked at, as `failurelab doctor` tells it: lines, JSON, and a verdict."""

import dataclasses
import enum
import shutil
import textwrap
from typing import Any


class Outcome(str, enum.Enum):  # a StrEnum, which Python 3.10 does not have
    """What became of one thing; in JSON and in a line its own text."""

    PASS = "PASS"
    FAIL = "FAIL"
    ENVIRONMENT = "ENVIRONMENT"  # it broke before the question was asked
    NOT_RUN = "NOT RUN"

    __str__ = str.__str__


PASS, FAIL, NOT_RUN = Outcome.PASS, Outcome.FAIL, Outcome.NOT_RUN
# Of a Python's libraries: what trl's trainers are spared of and a script of one's own may meet.
IF_YOURS = "IF YOURS"
_INDENT = " " * 9


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what was looked at.
        status: PASS, FAIL, NOT RUN, or IF YOURS.
        detail: what was found.
        next_step: empty unless something can be done; lines after the first belong to it. Of a FAIL it must be done
            before the course.
        failure: the id of the failure that it is about, if any.
    """

    name: str
    status: str
    detail: str
    next_step: str = ""
    failure: str = ""


def steps(checks: list[Check]) -> list[str]:
    """Return what must be done, each once, in the order of the checks."""
    return list(dict.fromkeys(check.next_step for check in checks if check.status == FAIL and check.next_step))


def verdict(checks: list[Check]) -> str:
    """Return one line that says what came of it all."""
    failures = [check for check in checks if check.failure]
    if failures:
        affected = [check.failure for check in failures if check.status == FAIL]
        yours = [check.failure for check in failures if check.status == IF_YOURS]
        also = f" Code of your own may meet {', '.join(yours)}." if yours else ""
        if not affected:
            return f"These versions have none of the {len(failures)} failures.{also}"
        listed = f"{len(affected)} of the {len(failures)} failures of this course: {', '.join(affected)}"
        return f"These versions have {listed}.{also}"
    todo = steps(checks) or [check.name for check in checks if check.status == FAIL]
    if todo:
        return f"NOT READY: {len(todo)} thing{'s' * (len(todo) > 1)} to do before the course, then ask again."
    left = [check.name for check in checks if check.status == NOT_RUN]
    return f"You are ready.{' Not on this machine: ' + ', '.join(left) + '.' if left else ''}"


def to_json(checks: list[Check]) -> dict[str, Any]:
    """Return the checks as JSON can hold them."""
    return {
        "schema": 1,
        "exit_status": exit_status(checks),
        "verdict": verdict(checks),
        "next": steps(checks),
        "checks": [dataclasses.asdict(check) for check in checks],
    }


def text(checks: list[Check]) -> str:
    """Return the checks as lines: the verdict, `STATUS name` with an indented detail, and a list of next steps.

    Of another Python, FAIL reads EXPOSED: nothing has failed there, and nothing was tried. The failures that its
    versions do not have are one line.
    """
    words: dict[str, str] = {FAIL: "EXPOSED"} if any(check.failure for check in checks) else {}
    width = max(70, min(120, shutil.get_terminal_size().columns))
    spared = [check.failure for check in checks if check.failure and check.status == PASS]
    lines = _wrap(verdict(checks), "", width)
    for check in checks:
        if check.failure in spared:
            continue
        lines += [f"{words.get(check.status, check.status):<8} {check.name}", *_wrap(check.detail, _INDENT, width)]
    lines += _wrap(f"Not in these versions: {', '.join(spared)}", _INDENT, width, f"{PASS:<8} ") if spared else []
    could = [check.next_step for check in checks if check.status == NOT_RUN and check.next_step]
    yours = [check.next_step for check in checks if check.status == IF_YOURS and check.next_step]
    for head, listed in (
        ("Next:", steps(checks)),
        ("If your own code does that:", yours),
        ("If you want more:", could),
    ):
        if listed:
            lines.append(head)
        for step in listed:
            first, *rest = step.splitlines()
            lines += _wrap(first, "    ", width, "  - ")
            for line in rest:
                lines += _wrap(line, "        ", width, "      - ")
    return "\n".join(lines)


def _wrap(text: str, indent: str, width: int, first: str = "") -> list[str]:
    """Break a text into lines, but not inside code: the arguments of a call, a list or a dict."""
    open_brackets: list[bool] = []  # of each, whether code is in it
    shown = ""
    for before, character in zip(" " + text, text):
        if character in "([{":
            open_brackets.append(character != "(" or not before.isspace())
        elif character in ")]}" and open_brackets:
            open_brackets.pop()
        shown += "\0" if character == " " and any(open_brackets) else character
    wrapper = textwrap.TextWrapper(width, first or indent, indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in wrapper.wrap(shown)]


def exit_status(checks: list[Check]) -> int:
    """Return 1 if any check failed, else 0."""
    return int(any(check.status == FAIL for check in checks))
