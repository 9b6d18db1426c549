"""The diff at each notebook's end, applied to the reader's script: broken before, healed after, measured in its era.

`diffs/NAME.py` says how: `MEASURE` is run after the script in the same process, and sets `healed` and `metrics`;
`RAISES` matches the error of a script that raises before the diff, and `BEFORE` is run before the script: what a
launcher does, or a node that is not there.
"""

import importlib.util
import pathlib
import re
import subprocess

import pytest

from failurelab_course import eras
from failurelab_course.notebook import kernel, magics
from failurelab_course.runs import lint, stored
from failurelab_course.runs import notebooks as course

HERE = pathlib.Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "diffs").glob("*.py"))


def script_and_diff(notebook):
    """Return the era, the names that the script is given, its source, and the diff."""
    (source,) = [cell.source for cell in notebook.code if "script" in stored.tags(cell)]
    (diff,) = [lint.diff_of(cell.source) for cell in notebook.content.cells if "diff" in stored.tags(cell)]
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


def run(era, source, measure, folder, before=""):
    """Run the script and the measurement in a kernel of its era; return `healed`, `metrics`, and the error if any."""
    from failurelab_course.experiments import models

    process = kernel.EraKernel(era)
    try:
        process.start(preload=True)
        given = {"model_path": models.source("tiny"), "device": "cpu", "seed": 0}
        process.run(f"import os; os.chdir({str(folder)!r})\n{before}", given)
        try:
            process.run(source)
        except magics.EraCellError as error:
            return {"error": f"{error.ename}: {error.evalue}"}
        return process.run(measure, fetch=["healed", "metrics"]) | {"error": None}
    finally:
        process.stop()


def test_every_notebook_of_a_failure_has_its_diff_tried():
    """A notebook whose diff nobody applies may promise anything."""
    assert [name for name in course.known() if not name.startswith("00")] == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_diff_heals_the_script(name, tmp_path):
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
