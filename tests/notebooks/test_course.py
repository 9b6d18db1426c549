"""`failurelab run`: a run of a notebook ends as what it was, and leaves nothing behind."""

import json
import os
import sys
import threading
import types
import xml.etree.ElementTree as ElementTree

import nbformat
import pytest

from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import runs

pytestmark = pytest.mark.slow

# A kernel with a child in a session of its own, as an era's kernel is; both ids are written before it hangs.
HANG = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
time.sleep(3600)
"""
# An orphan in a session of its own: ipykernel ends its children when it is shut down, and does not know this one.
FORGET = """
import subprocess, sys
code = "import subprocess, sys; null = subprocess.DEVNULL;"
code += "sleep = [sys.executable, '-c', 'import time; time.sleep(3600)'];"
code += "print(subprocess.Popen(sleep, start_new_session=True, stdout=null, stderr=null).pid)"
pid = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
open("pids", "w").write(pid)
"""
RECORD = """
import json, os, pathlib
folder = pathlib.Path(os.environ["FAILURELAB_EVIDENCE"])
made = {"schema": 1, "failure": "ground", "case": "", "state": "healthy", "era": "today", "tier": "cpu", "seed": seed,
        "device": "none", "versions": {}, "source": os.environ["FAILURELAB_SOURCE"], "figures": {"learns": True}}
(folder / "1.jsonl").write_text(json.dumps(made) + "\\n")
"""
SETUP = "class notebook:\n    def setup(**_): {}\nnotebook.setup(seed=seed)"


@pytest.fixture(scope="module")
def ran(plant_once, tmp_path_factory):
    """One run of many notebooks, each with another end; by name, and the folder with what was kept.

    A user's own kernelspec named python3 hides the environment's: with it the wrong libraries would be tested.
    """
    plant_once("00_passes", RECORD, f"import sys\nassert sys.executable == {sys.executable!r}\nprint('seed', seed)")
    plant_once("01_fails", "1 / 0", "print('never')")
    plant_once("02_ends_early", "import sys\nsys.exit(0)", "print('never')")
    plant_once("03_broken_setup", SETUP.format("import no_such_library"), "print('never')")
    plant_once("04_fails_after_setup", SETUP.format("pass"), "import no_such_library")
    plant_once("05_not_run", "class NotRun(Exception): pass", "raise NotRun('no GPU is found')", "print('never')")
    plant_once("06_kernel_dies", "print(1)", "import os\nos.kill(os.getpid(), 9)")
    plant_once("07_unknown_magic", "%%no_such_magic\npass")
    plant_once("08_half_a_record", RECORD + "\n(folder / '2.jsonl').write_text('{')")
    plant_once("09_forgets", FORGET)
    out = tmp_path_factory.mktemp("run")
    spec = out / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/bin/false"], "display_name": "another", "language": "python"}))
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(runs, "PATIENCE", 0.5)
        changed.setenv("JUPYTER_PATH", str(out / "jupyter"))
        changed.setenv("JUPYTER_PREFER_ENV_PATH", "0")
        found = runs.run(folder=plant_once.folder, out=out, seed=5, jobs=2, time_limit=300)
    return {each.name: each for each in found} | {"out": out, "all": found, "folder": plant_once.folder}


@pytest.mark.parametrize(
    ("name", "status", "reason", "cells"),
    [
        ("00_passes", "PASS", "", "3 of 3"),
        ("01_fails", "FAIL", "In [3]: ZeroDivisionError: division by zero", "1 of 3"),
        ("02_ends_early", "FAIL", "it ended early, without an error", "1 of 3"),
        ("03_broken_setup", "ENVIRONMENT", "ModuleNotFoundError: No module named 'no_such_library'", "1 of 3"),
        ("04_fails_after_setup", "FAIL", "ModuleNotFoundError: No module named 'no_such_library'", "2 of 3"),
        ("05_not_run", "NOT RUN", "no GPU is found", "2 of 4"),
        ("06_kernel_dies", "FAIL", "DeadKernelError", "2 of 3"),
        ("07_unknown_magic", "FAIL", "Cell magic `%%no_such_magic` not found", "1 of 2"),
        ("08_half_a_record", "FAIL", "its evidence cannot be read: 2.jsonl line 1 is not JSON", "2 of 2"),
        ("09_forgets", "PASS", "", "2 of 2"),
    ],
)
def test_a_run_ends_as_what_it_was(ran, name, status, reason, cells):
    """Papermill knows success and error; a broken machine, an early exit and a run not made are neither."""
    result = ran[name]
    assert (result.status, f"{result.cells} of {result.of}") == (status, cells), result.reason
    assert reason in result.reason and (reason or not result.reason)
    assert "\n" not in result.reason


@pytest.mark.parametrize(
    ("name", "says", "status"),
    [
        ("EraError", "era x is missing. Next: y", "ENVIRONMENT"),
        ("EraKernelDied", "the kernel of era x died", "FAIL"),
    ],
)
def test_an_era_that_is_not_ready_is_told_from_one_that_dies(plant, tmp_path, name, says, status):
    (notebook,) = course.find([], plant("00_one", "pass").parent)
    error = types.SimpleNamespace(ename=name, evalue=says, exec_count=2)
    found = runs.NotebookRun(notebook, {}, tmp_path, "mark")._outcome_of_cell(error)
    assert found == (status, says if status == "ENVIRONMENT" else f"In [2]: {name}: {says}")


def test_what_a_notebook_leaves_running_is_ended(ran, gone):
    assert gone([int((ran["folder"] / "pids").read_text())]) == []


def test_copies_html_and_evidence_are_kept_even_of_a_failed_run(ran):
    for result in ran["all"]:
        assert nbformat.read(result.copy, as_version=4).metadata.papermill.start_time
        assert result.name in result.html.read_text() and "</html>" in result.html.read_text()
    assert "ZeroDivisionError" in ran["01_fails"].html.read_text()
    result = ran["00_passes"]
    assert "seed 5" in nbformat.read(result.copy, as_version=4).cells[-1].outputs[0].text
    assert result.records[0]["source"] == "00_passes" and result.records[0]["seed"] == 5
    assert result.figures(state="healthy") == {"learns": True}


def test_results_are_written_with_their_denominators(ran):
    kept = json.loads((ran["out"] / "results.json").read_text())
    assert kept["summary"] == "2 of 10 PASS, 6 FAIL, 1 ENVIRONMENT, 1 NOT RUN"
    assert kept["ran_on"]["device"] == "cpu" and kept["exit_status"] == 1 and len(kept["results"]) == 10
    assert kept["results"][0]["peak_bytes"] > 10_000_000
    root = ElementTree.parse(ran["out"] / "junit.xml").getroot()
    counts = [int(root.get(name)) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == [10, 6, 1, 1]


def test_bad_input_is_told_before_anything_starts(plant, tmp_path):
    path = plant("00_one", "open('started', 'w')")

    def told(match, names=("0", "00", "00_one", "00_one.ipynb"), **options):
        with pytest.raises(course.CourseError, match=match):
            runs.run(names, folder=plant.folder, out=tmp_path / "run", **options)

    assert len(course.find(("0", "00", "00_one", "00_one.ipynb"), plant.folder)) == 1
    told("unknown notebook '7': the notebooks are 00_one", ["7"])
    told("jobs must be at least 1", jobs=0)
    told("time limit above 0", time_limit=0)
    path.write_text(path.read_text()[:50])
    told("notebook 00_one.ipynb is no notebook: .*git checkout")
    path.unlink()
    told("no notebook is in")
    assert not (plant.folder / "started").exists() and not (tmp_path / "run").exists()


def test_a_hung_kernel_is_ended_with_all_it_started(plant, tmp_path, gone, pipe, monkeypatch):
    plant("00_hangs", HANG)
    plant("01_passes", "print(1)")
    hangs, pids = pipe(plant.folder / "pids"), []

    class Timer(threading.Timer):
        def run(self):
            """For the notebook that hangs, the time is over when it does."""
            if self.function.__self__.result.name == "00_hangs":
                pids.extend(map(int, hangs().split()))
                self.function(*self.args)

    monkeypatch.setattr(runs.threading, "Timer", Timer)
    hung, passed = runs.run(folder=plant.folder, out=tmp_path / "run", time_limit=20)
    assert (hung.status, passed.status) == ("FAIL", "PASS")
    assert hung.reason.startswith("over its time limit of 20 s, after 1 of 2 cells")
    assert len(pids) == 2 and gone(pids) == []


def test_a_runner_that_cannot_start_is_the_environments_fault(plant, tmp_path, monkeypatch):
    """A library that the runner itself needs is missing: that says nothing about the notebook."""
    monkeypatch.setitem(sys.modules, "papermill", None)
    plant("00_one", "print(1)")
    (result,) = runs.run(folder=plant.folder, out=tmp_path / "run", time_limit=300)
    assert result.status == "ENVIRONMENT" and "import of papermill halted" in result.reason


def test_who_waits_sees_how_far_a_run_is_and_each_has_its_folder(plant, tmp_path, monkeypatch, capsys):
    """One notebook needs an era in the making: it comes last, waits, and says what that set-up says.

    Of the other the log says at which cell it is. The last lines say what to open, and `latest` leads there.
    """
    looks = iter([True, True, True])

    class Era:
        name, setup_line = "old", "98 packages"
        is_being_made = property(lambda self: next(looks, False))

    os.mkfifo(tmp_path / "pipe")
    plant("00_needs", "# Library stacks: old. ", parameters=None)
    cell = f"# Library stacks: today, trl-0.14. \nopen({str(tmp_path / 'pipe')!r}).read()"
    plant("01_passes", cell, "print(1)", parameters=None)
    lines = []

    def say(line, **_):
        if "01_passes at cell 1 of 2" in line and line not in lines:
            (tmp_path / "pipe").write_text("go on")
        lines.append(line)

    others = runs.eras.known()
    monkeypatch.setattr(runs.eras, "known", lambda: [Era(), *others])
    monkeypatch.setattr(runs, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(runs, "LINE_EVERY", 0.1)
    monkeypatch.setattr(runs.eras, "root", lambda: tmp_path)
    monkeypatch.setattr(runs.eras, "find", lambda *_, **__: type("Era", (), {"variables": {}}))
    monkeypatch.setattr(runs, "print", say, raising=False)
    found = runs.run(folder=plant.folder, jobs=1, time_limit=300)
    assert [each.status for each in found] == ["PASS", "PASS"] and found[1].eras == ["today", "trl-0.14"]
    first, second, third = (
        next(number for number, line in enumerate(lines) if line.startswith(start))
        for start in ("01_passes: PASS", "00_needs: waits. 98 packages", "00_needs: started, 1 cells, era old")
    )
    assert first < second < third
    said = capsys.readouterr().out
    assert said.splitlines()[-2] == f"Open {found[0].html}" and "today, trl-0.14" in said and "2 of 2 PASS" in said
    assert "eras: today, trl-0.14" in found[1].html.read_text()
    latest, kept = found[0].copy.parent, tmp_path / ".course" / "runs"
    assert (kept / "latest").resolve() == latest and (latest / "results.json").is_file()
