"""What became of what was run: a notebook, a lab's script, a check of the machine; and how it is reported.

Success and error are not enough. A run whose environment broke before the question was asked says nothing about the
question, and what was not run is no pass. The exit status, the line with the denominators and the JUnit XML, which
every CI system reads, keep the four apart.
"""

import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

import junitparser

from failurelab.checks import Outcome
from failurelab_course import state_file

__all__ = ["STYLES", "Case", "Outcome", "exit_status", "summary", "write_junit"]

# How rich shows each in a table.
STYLES = {
    Outcome.PASS: "bold green",
    Outcome.FAIL: "bold red",
    Outcome.ENVIRONMENT: "bold yellow",
    Outcome.NOT_RUN: "bold cyan",
}
_NOT_IN_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def exit_status(outcomes: Iterable[str]) -> int:
    """Return 1 if anything failed; else 3 if the environment broke something, or if nothing passed at all; else 0.

    So 0 means: at least one passed, and whatever did not was NOT RUN for a reason that it gave and the table shows.
    """
    outcomes = list(outcomes)
    if Outcome.FAIL in outcomes:
        return 1
    return 3 if Outcome.ENVIRONMENT in outcomes or Outcome.PASS not in outcomes else 0


def summary(outcomes: Iterable[str]) -> str:
    """Return one line with its denominator: `7 of 8 PASS, 1 NOT RUN`."""
    outcomes = list(outcomes)
    counts = {outcome: outcomes.count(outcome) for outcome in Outcome}
    others = [f"{count} {outcome}" for outcome, count in counts.items() if count and outcome != Outcome.PASS]
    return ", ".join([f"{counts[Outcome.PASS]} of {len(outcomes)} PASS", *others])


class Case(NamedTuple):
    """One thing that ran, as a test case: its suite, name, outcome, reason, seconds and output."""

    suite: str
    name: str
    outcome: str
    reason: str
    seconds: float
    output: str = ""


def write_junit(path: pathlib.Path, cases: Iterable[Case], name: str) -> None:
    """Write the cases as a JUnit document called `name`, a suite for each of theirs, whole or not at all.

    FAIL is a `failure`, ENVIRONMENT an `error`, NOT RUN is `skipped`, each with its reason; PASS has nothing.
    """
    kinds = {"FAIL": junitparser.Failure, "ENVIRONMENT": junitparser.Error, "NOT RUN": junitparser.Skipped}
    suites: dict[str, junitparser.TestSuite] = {}
    for case in cases:
        test = junitparser.TestCase(case.name, case.suite, round(case.seconds, 3))
        if kind := kinds.get(case.outcome):
            result = kind(_NOT_IN_XML.sub("", case.reason), case.outcome)
            result.text = result.message
            test.result = result
        if case.output:
            test.system_out = _NOT_IN_XML.sub("", case.output)
        suites.setdefault(case.suite, junitparser.TestSuite(case.suite)).append(test)
    document = junitparser.JUnitXml(name)
    document.extend(suites.values())
    document.update_statistics()
    path.parent.mkdir(parents=True, exist_ok=True)
    state_file.write(path, f'<?xml version="1.0" encoding="utf-8"?>\n{document.tostring().decode()}\n')
