"""The diff at each notebook's end, applied to the reader's script: broken before, healed after, measured in its era.

`diffs/NAME.py` says how: `MEASURE` is run after the script, with its names, and sets `healed` and `metrics`;
`RAISES` matches the error of a script that raises before the diff, and `BEFORE` is run before the script: what a
launcher does, or a node that is not there.
"""

import importlib.util
import json
import pathlib
import re
import subprocess

import pytest
from tools.notebook_lint import diff_of

from failurelab_course import eras
from failurelab_course.experiments import models
from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import stored

HERE = pathlib.Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "diffs").glob("*.py"))


def script_and_diff(notebook):
    """Return the era, the names that the script is given, its source, and the diff."""
    (source,) = [cell.source for cell in notebook.code if "script" in stored.tags(cell)]
    (diff,) = [diff_of(cell.source) for cell in notebook.content.cells if "diff" in stored.tags(cell)]
    head, _, body = source.partition("\n")
    if not head.startswith("%%era "):
        return eras.TODAY, source, diff
    return head.split()[1], body, diff


def apply(script, diff, folder):
    """Return the script with the diff applied, as a reader would: by git."""
    path = folder / "train.py"
    path.write_text(script + "\n", encoding="utf-8")
    done = subprocess.run(
        ["git", "apply", "-p0", "--unidiff-zero", "--whitespace=nowarn", "-"],
        input=diff, cwd=folder, text=True, capture_output=True, env={"PATH": "/usr/bin:/bin", "GIT_DIR": "/nowhere"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path.read_text(encoding="utf-8")


# Imports trl once. Each line of its input is a script, which is run and measured in a fork, and answered in a line.
RUNNER = """
import atexit, json, os, sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the import and the scripts print
from trl import GRPOTrainer


def answer(task):
    os.chdir(task["folder"])
    names = dict(task["given"], __name__="__main__")
    exec(task["before"], names)
    try:
        exec(compile(task["source"], "train.py", "exec"), names)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    exec(task["measure"], names)
    return {"healed": bool(names["healed"]), "metrics": names["metrics"], "error": None}


for line in sys.stdin:
    if os.fork() == 0:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
        atexit._run_exitfuncs()
        os._exit(0)
    if os.wait()[1]:
        print(json.dumps({"error": "the script's process did not end by itself"}), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def run():
    """Return a function that runs a script and its measurement in its era: `healed`, `metrics`, the error if any."""
    runners = {}

    def ask(era, source, measure, folder, before=""):
        if era not in runners:
            found = eras.find(era)
            command = [str(found.python), "-W", "ignore", "-c", RUNNER]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            runners[era] = subprocess.Popen(command, env=eras.environment(found), **pipes)
        given = {"model_path": models.source("tiny"), "device": "cpu", "seed": 0}
        task = {"folder": str(folder), "before": before, "source": source, "measure": measure, "given": given}
        print(json.dumps(task), file=runners[era].stdin, flush=True)
        return json.loads(runners[era].stdout.readline())

    yield ask
    for runner in runners.values():
        runner.communicate()


def test_every_notebook_of_a_failure_has_its_diff_tried():
    """A notebook whose diff nobody applies may promise anything."""
    assert [name for name in course.known() if not name.startswith("00")] == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_diff_heals_the_script(name, tmp_path, run):
    """The script of the notebook is broken for the stated reason; with the diff alone it is healed."""
    spec = importlib.util.spec_from_file_location(f"diffs_{name}", HERE / "diffs" / f"{name}.py")
    trial = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trial)
    (notebook,) = course.find([name])
    era, script, diff = script_and_diff(notebook)
    healed = apply(script, diff, tmp_path)
    setting = getattr(trial, "BEFORE", "")
    before = run(era, script, trial.MEASURE, tmp_path, setting)
    raises = getattr(trial, "RAISES", None)
    if raises:
        assert before["error"] and re.search(raises, before["error"]), before
    else:
        assert before["error"] is None and before["healed"] is False, before
    after = run(era, healed, trial.MEASURE, tmp_path, setting)
    assert after["error"] is None and after["healed"] is True, (before, after)
