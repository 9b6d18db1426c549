"""Every notebook of the course: its contract, a run with another seed, and nbval's comparison of its verdicts.

A notebook's recorded figures are asserted in `figures/NAME.py`, by a function `check(result)`: a run without an error
can still have measured nonsense.
"""

import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from failurelab_course import eras
from failurelab_course.runs import lint as contract
from failurelab_course.runs import notebooks as course
from failurelab_course.runs import stored

HERE = pathlib.Path(__file__).parent
NAMES = course.known()
SEED = 1


@dataclasses.dataclass
class Compared:
    """What nbval made of one notebook: its output, and one entry for each code cell."""

    status: int
    said: str
    cells: list[dict]

    @property
    def compared(self) -> list[dict]:
        return [cell for cell in self.cells if cell.get("compared")]


def nbval(path: pathlib.Path, folder: pathlib.Path) -> Compared:
    """Run nbval on one notebook, in a process of its own."""
    count = folder / f"{path.stem}.json"
    environment = os.environ | eras.find(eras.TODAY, ready=False).variables
    environment |= {"NBVAL_COUNT": str(count), "PYTHONPATH": str(HERE)}
    options = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=900", "--nbval-kernel-startup-timeout=180"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "nbval_count", "-p", "no:cacheprovider", *options, str(path)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    cells = json.loads(count.read_text()) if count.exists() else []
    return Compared(done.returncode, done.stdout + done.stderr, cells)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """All notebooks through papermill, with another seed than the stored outputs', two at once."""
    results = course.run(seed=SEED, out=tmp_path_factory.mktemp("run"), jobs=2, time_limit=1800, progress=False)
    return {result.name: result for result in results}


@pytest.fixture(scope="module")
def validated(ran, tmp_path_factory):
    """All notebooks that can run here through nbval, two at once."""
    folder = tmp_path_factory.mktemp("nbval")
    able = [notebook for notebook in course.notebooks() if ran[notebook.name].status != "NOT RUN"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda notebook: nbval(notebook.path, folder), able)
        return dict(zip((notebook.name for notebook in able), made))


@pytest.mark.parametrize("name", NAMES)
def test_the_contract_holds(name):
    """Next, where it does not: failurelab outputs NAME, or what the violation says."""
    (notebook,) = course.find([name])
    assert [str(violation) for violation in contract.check(notebook.path)] == []


def test_every_notebook_has_its_figures_asserted():
    """A notebook without assertions, or assertions without a notebook, would go unnoticed."""
    assert sorted(path.stem for path in (HERE / "figures").glob("*.py")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_measures_the_same_story(ran, name):
    """The figures recorded with another seed still tell what the notebook says."""
    result = ran[name]
    if result.status == "NOT RUN":
        pytest.skip(f"NOT RUN: {result.reason}")
    assert result.status == "PASS", f"{result.reason} (see {result.html})"
    assert result.records and all(record["seed"] in (SEED, None) for record in result.records)
    spec = importlib.util.spec_from_file_location(f"figures_{name}", HERE / "figures" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.check(result)


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_verdicts_come_out_again(validated, name):
    """Nbval runs the notebook as a reader does and compares each marked cell; so many as are marked, and not none."""
    if name not in validated:
        pytest.skip("NOT RUN, see the test above")
    found = validated[name]
    assert found.status == 0, found.said[-6000:]
    assert all(cell["outcome"] == "passed" for cell in found.cells)
    (notebook,) = course.find([name])
    assert len(found.compared) == len(stored.checked_cells(notebook.content)) > 0


def test_a_verdict_that_changed_is_found(plant, tmp_path):
    """The comparison is alive: a stored verdict that no longer comes out fails, an unmarked output may differ."""
    path = plant("00_one", "print('healthy')", "print('unmarked')")
    planted = json.loads(path.read_text())
    planted["cells"][2]["metadata"]["tags"] = [stored.CHECKED]
    path.write_text(json.dumps(planted))
    course.regenerate(folder=plant.folder, out=tmp_path / "run", progress=False, time_limit=300)
    right = nbval(path, tmp_path)
    assert (right.status, len(right.cells), len(right.compared)) == (0, 3, 1), right.said
    path.write_text(path.read_text().replace('"unmarked\\n"', '"something else\\n"'))
    assert nbval(path, tmp_path).status == 0
    path.write_text(path.read_text().replace('"healthy\\n"', '"red flag\\n"'))
    wrong = nbval(path, tmp_path)
    assert wrong.status == 1 and [cell["outcome"] for cell in wrong.compared] == ["failed"], wrong.said
