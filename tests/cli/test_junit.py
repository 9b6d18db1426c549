"""Results for a CI system: FAIL, ENVIRONMENT and NOT RUN told apart, and counts that add up."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from failurelab_course import junit
from failurelab_course.labs import verify as labs

CASES = [
    junit.Case("notebooks", "00_start_here", "PASS", "", 1.5),
    junit.Case("notebooks", "01_requires_grad_warning", "FAIL", "cell 3: <AssertionError> & more", 2.0),
    junit.Case("notebooks", "06_zero3_optimizer", "ENVIRONMENT", "\x1b[31mno era\x1b[0m", 0.25),
    junit.Case("gpu", "07_four_bit_devices", "NOT RUN", "no GPU", 0.0, "said\x00something"),
]


def test_each_result_is_what_a_ci_system_calls_it():
    """A broken environment is an error, not a failure, and what was not run is no pass."""
    root = ElementTree.fromstring(junit.to_xml(CASES, "course"))
    assert root.tag == "testsuites"
    found = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert found == {
        "00_start_here": [],
        "01_requires_grad_warning": ["failure"],
        "06_zero3_optimizer": ["error"],
        "07_four_bit_devices": ["skipped", "system-out"],
    }
    assert root.find(".//failure").get("message") == "cell 3: <AssertionError> & more"
    assert root.find(".//error").text == "[31mno era[0m"


def test_the_counts_add_up():
    root = ElementTree.fromstring(junit.to_xml(CASES, "course"))
    first, second = root.findall("testsuite")
    names = ("tests", "failures", "errors", "skipped", "time")
    assert [first.get(name) for name in names] == ["3", "1", "1", "0", "3.750"]
    assert [second.get(name) for name in names] == ["1", "0", "0", "1", "0.000"]
    assert [root.get(name) for name in names] == ["4", "1", "1", "1", "3.750"]


def test_a_lab_s_rows_are_test_cases(tmp_path):
    matrix = [labs.Row("01_a", "form", "lab.toml", "PASS"), labs.Row("01_a", "broken", "broken.py", "FAIL", "solved")]
    junit.write(tmp_path / "deep" / "labs.xml", labs.cases(matrix), "labs")
    root = ElementTree.parse(tmp_path / "deep" / "labs.xml").getroot()
    assert [case.get("name") for case in root.iter("testcase")] == ["form: lab.toml", "broken: broken.py"]
    assert root.get("failures") == "1"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["labs.xml"]


def test_a_run_writes_it_where_it_is_told(tmp_path):
    """A notebook that is not known fails before anything is written; the course's own run is tested elsewhere."""
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "failurelab", "run", "99", "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 1 and not out.exists()
