"""How long the course takes is written by runs: benchmarks/times.py, and the tables that show it."""

import os
import runpy
import sys

import pytest

from failurelab_course import eras, outcomes
from failurelab_course.experiments import observe
from failurelab_course.ledger.records import read_ledger
from failurelab_course.ledger.tables.times import SOURCE, notebook_times, times

SCRIPT = str(eras.root() / "benchmarks" / "times.py")


def record(part, **metrics):
    return {"source": SOURCE, "case": f"how long: {part}", "figures": metrics}


def test_the_table_says_minutes_and_what_else_the_machine_did():
    """Minutes near zero are not rounded away."""
    proof = record("proof", minutes=5.26, processor_minutes=9.98, others_share=0.034)
    lines = times([proof, record("again", minutes=0.012, processor_minutes=0.001, others_share=0.0)]).splitlines()
    assert lines[4].endswith("| 0.01 | under 0.01 | 0% |")
    assert lines[-3] == "| the proof of the labs (`failurelab verify`) | 5.3 | 10.0 | 3% |"
    assert lines[-1] == "| `make test`, once set up | not recorded |  |  |"


def test_the_notebooks_come_from_the_run_of_all():
    assert notebook_times([]) == "not recorded"
    made = record("course", notebooks=["00_a", "01_b"], seconds=[36, 46], peak_mib=[630, 900])
    assert notebook_times([made]).splitlines()[2:] == ["| 00 | 36 | 630 |", "| 01 | 46 | 900 |"]


def test_what_a_command_took_and_what_others_took(tmp_path):
    """A process that computes is counted as our own; the times of a command that fails are no figures."""
    timed = runpy.run_path(SCRIPT)["timed"]
    took = timed([sys.executable, "-c", "sum(range(10**7))"], tmp_path, tmp_path / "caches")
    assert 0 < took["processor_minutes"] < took["minutes"] * os.cpu_count()
    assert 0 <= took["others_share"] <= 1
    with pytest.raises(SystemExit, match="ended with status 3: no time is recorded"):
        timed([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, tmp_path / "caches")


def test_what_others_took_is_of_what_the_processors_could_do(tmp_path, monkeypatch):
    """20 of 80 s that they could work went to someone; less the command's own, which is next to nothing."""
    read = iter([(100.0, 1000.0), (120.0, 1080.0)])
    timed = runpy.run_path(SCRIPT)["timed"]
    monkeypatch.setattr(observe, "machine_seconds", lambda: next(read))
    took = timed([sys.executable, "-c", "pass"], tmp_path, tmp_path / "caches")
    assert took["others_share"] == pytest.approx((20 - 60 * took["processor_minutes"]) / 80)
    assert 0.1 < took["others_share"] < 0.25


def test_the_tests_minutes_come_from_what_they_wrote(tmp_path):
    """A run with failures, or a file that is none, gives no figure."""
    of_junit = runpy.run_path(SCRIPT)["of_junit"]
    path = tmp_path / "tests.xml"
    suite = '<testsuites><testsuite tests="12" failures="{}" errors="0" skipped="1" time="90.0">'
    for name, seconds in (("cli.test_a", 1), ("labs.test_b", 50.2), ("cli.test_a", 2)):
        suite += f'<testcase classname="tests.{name}" time="{seconds}"/>'
    suite += "</testsuite></testsuites>"
    path.write_text(suite.format(0))
    took = of_junit(path)
    assert (took["minutes"], took["tests"], took["skipped"]) == (1.5, 12, 1)
    assert (took["files"], took["file_seconds"]) == (["test_b", "test_a"], [50, 3])
    assert "| `make test`, once set up | 1.5 | - | - |" in times([record("tests", **took)])
    path.write_text(suite.format(2))
    with pytest.raises(SystemExit, match="2 failures, 0 errors: no time is recorded"):
        of_junit(path)
    path.write_text("half <a")
    with pytest.raises(SystemExit, match="is no JUnit XML of pytest"):
        of_junit(path)


def test_a_part_is_kept_beside_the_others(tmp_path, monkeypatch, capsys):
    """Measured again, it takes its own place, and no other's."""
    monkeypatch.setenv("FAILURELAB_SOURCE", SOURCE)
    keep, out = runpy.run_path(SCRIPT)["keep"], tmp_path / "ledger.json"
    for part, minutes in (("set-up", 4.0), ("tests", 40.0), ("set-up", 5.0)):
        keep(part, {"minutes": minutes}, out)
    assert len(read_ledger(out)) == 2
    lines = times(read_ledger(out)).splitlines()
    assert [line.split(" | ")[1] for line in (lines[3], lines[-2], lines[-1])] == ["5.0", "40.0", "45.0"]


def test_what_takes_longer_than_its_budget_is_named(tmp_path, monkeypatch, capsys):
    """A lab's seconds are those of all its scripts, from what `failurelab verify --junit` wrote."""
    monkeypatch.setenv("FAILURELAB_SOURCE", SOURCE)
    script, out = runpy.run_path(SCRIPT), tmp_path / "ledger.json"
    cases = [outcomes.Case(lab, name, "PASS", "", 8.0) for lab, name in (("01_a", "x"), ("02_b", "x"), ("02_b", "y"))]
    (tmp_path / ".course").mkdir()
    outcomes.write_junit(tmp_path / ".course" / "labs.xml", [*cases, cases[2]], "labs")
    assert script["labs"](tmp_path) == {"labs": ["01_a", "02_b"], "seconds": [8, 24]}
    script["keep"]("proof", {"minutes": 1.0} | script["labs"](tmp_path), out)
    script["keep"]("course", {"notebooks": ["00_c", "01_d"], "seconds": [40, 41]}, out)
    assert sorted(script["over_budget"](out)) == [
        "01_d: 41 s, its budget is 40 s",
        "02_b: 24 s, its budget is 20 s",
    ]
    monkeypatch.setattr(sys, "argv", ["times.py", "--budget", "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(SCRIPT, run_name="__main__")
    assert end.value.code == 1 and "01_d: 41 s" in capsys.readouterr().out


def test_an_unknown_part_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["times.py", "--only", "set-up,dinner"])
    with pytest.raises(SystemExit):
        runpy.run_path(SCRIPT, run_name="__main__")
    assert "no part dinner: the parts are first, set-up, again" in capsys.readouterr().err


def test_a_machine_s_seconds_only_grow():
    worked, could = observe.machine_seconds()
    sum(range(10**6))
    later_worked, later_could = observe.machine_seconds()
    assert 0 < worked <= later_worked and worked < could <= later_could
