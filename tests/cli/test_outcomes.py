"""PASS, FAIL, ENVIRONMENT and NOT RUN told apart: by the exit status, the summary, and for a CI system."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from failurelab_course import eras, outcomes
from failurelab_course.labs import verify as labs
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
    """A broken environment is an error, not a failure, what was not run is no pass, and the counts add up."""
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
    row = labs.ScriptOutcome("01_a", "broken", "start", "FAIL", "solved")
    assert labs.cases([row]) == [("01_a", "broken: start", "FAIL", "solved", 0.0, "")]


def test_a_test_whose_stack_is_missing_is_told_as_environment(tmp_path):
    """By its name and the reason, apart from what failed, and the run is not green."""
    (tmp_path / "test_stacks.py").write_text(
        "import pytest\n"
        "from failurelab_course import eras\n"
        "@pytest.fixture\n"
        "def stack(): eras.find('trl-9')\n"
        "def test_in_it(stack): pass\n"
        "def test_elsewhere(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, cwd=eras.root(), capture_output=True, text=True)
    assert done.returncode == 1 and "1 passed, 1 environment" in done.stdout
    assert "test_stacks.py::test_in_it: unknown era 'trl-9'" in done.stdout.partition("\nENVIRONMENT ")[2]
    assert "FAILURES" not in done.stdout and "ERRORS" not in done.stdout
