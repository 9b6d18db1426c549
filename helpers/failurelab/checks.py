"""A list of things that were looked at, as `failurelab doctor` tells it: lines, JSON, and a verdict."""

import dataclasses
from typing import Any

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what was looked at.
        status: PASS, FAIL or NOT RUN.
        detail: what was found.
        next_step: empty unless something can be done. Of a FAIL it must be done before the course.
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
        found = [check.failure for check in failures if check.status == FAIL]
        told = f"{len(found)} of the {len(failures)} failures of this course: {', '.join(found)}"
        return f"These versions have {told}." if found else f"These versions have none of the {len(failures)} failures."
    todo = steps(checks) or [check.name for check in checks if check.status == FAIL]
    if todo:
        return f"NOT READY: {len(todo)} thing{'s' * (len(todo) > 1)} to do before the course, then ask again."
    left = [check.name for check in checks if check.status == NOT_RUN]
    return f"You are ready.{' Not on this machine: ' + ', '.join(left) + '.' if left else ''}"


def to_json(checks: list[Check]) -> dict[str, Any]:
    """Return the checks as JSON can hold them."""
    told = {"verdict": verdict(checks), "next": steps(checks)}
    return {
        "schema": 1,
        "exit_status": exit_status(checks),
        **told,
        "checks": [dataclasses.asdict(each) for each in checks],
    }


def text(checks: list[Check]) -> str:
    """Return the checks as lines: `STATUS name`, an indented detail, a list of next steps, and the verdict.

    Of another Python, FAIL reads EXPOSED: nothing has failed there, and nothing was tried.
    """
    words = {FAIL: "EXPOSED"} if any(check.failure for check in checks) else {}
    lines = []
    for check in checks:
        lines += [f"{words.get(check.status, check.status):<8} {check.name}", f"         {check.detail}"]
    could = [check.next_step for check in checks if check.status == NOT_RUN and check.next_step]
    for head, listed in (("Next:", steps(checks)), ("If you want more:", could)):
        lines += [head, *(f"  - {step}" for step in listed)] if listed else []
    return "\n".join([*lines, verdict(checks)])


def exit_status(checks: list[Check]) -> int:
    """Return 1 if any check failed, else 0."""
    return int(any(check.status == FAIL for check in checks))
