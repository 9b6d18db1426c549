"""PASS, FAIL, ENVIRONMENT and NOT RUN told apart: by the exit status, the summary, and for a CI system."""

import xml.etree.ElementTree as ElementTree

import pytest

from failurelab_course import outcomes
from failurelab_course.outcomes import Case, Outcome

CASES = [
    Case("notebooks", "00_start_here", "PASS", "", 1.5),
    Case("notebooks", "01_requires_grad_warning", "FAIL", "cell 3: <AssertionError> & more", 2.0),
    Case("notebooks", "06_zero3_optimizer", Outcome.ENVIRONMENT, "\x1b[31mno era\x1b[0m", 0.25),
    Case("gpu", "07_four_bit_devices", Outcome.NOT_RUN, "no GPU", 0.0, "said\x00something"),
]


@pytest.mark.parametrize(
    ("names", "status", "line"),
    [
        ("PASS NOT_RUN", 0, "1 of 2 PASS, 1 NOT RUN"),
        ("NOT_RUN", 3, "0 of 1 PASS, 1 NOT RUN"),
        ("PASS ENVIRONMENT", 3, "1 of 2 PASS, 1 ENVIRONMENT"),
        ("PASS FAIL ENVIRONMENT", 1, "1 of 3 PASS, 1 FAIL, 1 ENVIRONMENT"),
        ("", 3, "0 of 0 PASS"),
    ],
)
def test_exit_status_and_summary(names, status, line):
    """What was not run is no failure, but a run of such alone is no success either."""
    became = [Outcome[name] for name in names.split()]
    assert outcomes.exit_status(became) == outcomes.exit_status(map(str, became)) == status
    assert outcomes.summary(became) == line


def test_each_outcome_is_what_a_ci_system_calls_it(tmp_path):
    outcomes.write_junit(tmp_path / "deep" / "labs.xml", CASES, "course")
    root = ElementTree.parse(tmp_path / "deep" / "labs.xml").getroot()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["labs.xml"]
    assert root.tag == "testsuites" and root.get("name") == "course"
    assert {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")} == {
        "00_start_here": [],
        "01_requires_grad_warning": ["failure"],
        "06_zero3_optimizer": ["error"],
        "07_four_bit_devices": ["skipped", "system-out"],
    }
    assert root.find(".//failure").text == "cell 3: <AssertionError> & more"
    assert root.find(".//error").text == "[31mno era[0m" and root.find(".//system-out").text == "saidsomething"
    assert [int(root.get(name)) for name in ("tests", "failures", "errors", "skipped")] == [4, 1, 1, 1]
