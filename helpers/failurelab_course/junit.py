"""Results as JUnit XML, which every CI system reads: notebooks, or labs, as test cases.

A notebook that failed is a `failure`. One whose environment broke before the question was asked is an `error`, and one
that was not run is `skipped`, with its reason: neither is a pass.
"""

import pathlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from typing import NamedTuple

# What stands in a test case for each result; a pass has nothing.
_ELEMENTS = {"FAIL": "failure", "ENVIRONMENT": "error", "NOT RUN": "skipped"}
_COUNTED = {"failure": "failures", "error": "errors", "skipped": "skipped"}


class Case(NamedTuple):
    """One thing that ran: its suite, name, result (PASS, FAIL, ENVIRONMENT or NOT RUN), reason, seconds and output."""

    suite: str
    name: str
    result: str
    reason: str
    seconds: float
    output: str = ""


def to_xml(cases: Iterable[Case], name: str) -> str:
    """Return the cases as a JUnit document called `name`, a suite for each of theirs, with counts that add up."""
    cases = list(cases)
    root = ElementTree.Element("testsuites", name=name)
    for suite in dict.fromkeys(case.suite for case in cases):
        there = [case for case in cases if case.suite == suite]
        element = ElementTree.SubElement(root, "testsuite", name=suite)
        _count(element, there)
        for case in there:
            _add(element, case)
    _count(root, cases)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def write(path: pathlib.Path, cases: Iterable[Case], name: str) -> None:
    """Write the document, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(to_xml(cases, name), encoding="utf-8")
    partial.replace(path)


def _count(element: ElementTree.Element, cases: list[Case]) -> None:
    element.set("tests", str(len(cases)))
    for result, kind in _ELEMENTS.items():
        element.set(_COUNTED[kind], str(sum(case.result == result for case in cases)))
    element.set("time", f"{sum(case.seconds for case in cases):.3f}")


def _add(suite: ElementTree.Element, case: Case) -> None:
    element = ElementTree.SubElement(
        suite, "testcase", classname=case.suite, name=case.name, time=f"{case.seconds:.3f}"
    )
    if kind := _ELEMENTS.get(case.result):
        told = ElementTree.SubElement(element, kind, message=_printable(case.reason), type=case.result)
        told.text = _printable(case.reason)
    if case.output:
        ElementTree.SubElement(element, "system-out").text = _printable(case.output)


def _printable(text: str) -> str:
    """Return the text without the control characters that XML cannot hold, such as a terminal's colours."""
    return "".join(letter for letter in text if letter in "\n\t" or letter >= " ")
