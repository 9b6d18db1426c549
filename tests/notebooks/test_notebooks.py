"""Every notebook of the course: one run with its own parameters, judged twice.

The run is papermill's. Its figures are asserted in `expected/NAME.py`, by a function `check(result)`: a run without an
error can still have measured nonsense. Its marked outputs are compared with the stored ones by nbval's own comparison.
A notebook takes a minute, so what needs another execution is marked `nightly` (`make nightly`): runs with four other
seeds, the same on every night. `make nightly` lets nbval execute the notebooks too.
"""

import importlib
import json
import pathlib
import re

import pytest
from nbval import plugin as nbval
from tools.store_outputs import normalise

from failurelab_course import eras
from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import runs, stored

HERE = pathlib.Path(__file__).parent
NAMES = [notebook.name for notebook in course.notebooks()]
OTHER_SEEDS = (1, 2, 3, 4)


def compare(path, executed, request, monkeypatch):
    """Compare each marked cell of the notebook with the executed copy, as `pytest --nbval-lax` does.

    Returns:
        For each cell that was compared, an empty text, or how its output differs.
    """
    monkeypatch.setattr(request.config.option, "nbval_lax", True)
    items = list(nbval.IPyNbFile.from_parent(request.session, path=path).collect())
    cells = [cell for cell in normalise(stored.read(executed)).cells if cell.cell_type == "code"]
    assert [item.cell.source for item in items] == [cell.source for cell in cells]
    differences = []
    for item, cell in zip(items, cells):
        if item.options["check"] and item.cell.execution_count is not None and item.cell.outputs:
            same = item.compare_outputs(nbval.coalesce_streams(cell.outputs), nbval.coalesce_streams(item.cell.outputs))
            differences.append("" if same else "\n".join(item.comparison_traceback))
    return differences


def run(seed, out, request):
    """Run the notebooks that tests were asked for (all, without -k) through papermill, two at once; return by name."""
    named = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = {callspec.params["name"] for callspec in named if callspec and "name" in callspec.params}
    results = runs.run(sorted(asked), seed=seed, out=out, jobs=2, time_limit=1800)
    return {result.name: result for result in results}


@pytest.fixture(scope="module")
def ran(tmp_path_factory, request):
    return run(course.DEFAULTS["seed"], tmp_path_factory.mktemp("run"), request)


@pytest.fixture(scope="module", params=OTHER_SEEDS)
def ran_again(tmp_path_factory, request):
    """Another execution, with another seed than the stored outputs': the seed, and the results by name."""
    return request.param, run(request.param, tmp_path_factory.mktemp(f"seed{request.param}"), request)


def check_figures(result, seed):
    if result.status == "NOT RUN":
        pytest.skip(f"NOT RUN: {result.reason}")
    if result.status == "ENVIRONMENT":
        raise eras.EraError(result.reason)
    assert result.status == "PASS", f"{result.reason} (see {result.html})"
    assert result.records and all(record["seed"] in (seed, None) for record in result.records)
    importlib.import_module(f"tests.notebooks.expected.{result.name}").check(result)


def test_runs_that_are_named_are_there():
    """Homework names runs of the corpus by their names."""
    lists = (HERE.parents[1] / "benchmarks" / "training_runs").glob("*.toml")
    there = set(re.findall(r"run_[0-9a-f]{6}\b", "".join(path.read_text(encoding="utf-8") for path in lists)))
    named = {each.name: set(re.findall(r"run_[0-9a-f]{6}\b", each.path.read_text())) for each in course.notebooks()}
    assert set().union(*named.values()) <= there and named["11_same_flat_reward"]


def test_every_notebook_has_its_figures_asserted():
    """A notebook without assertions, or assertions without a notebook, would go unnoticed."""
    assert sorted(path.stem for path in (HERE / "expected").glob("*.py")) == sorted(NAMES)


# Where the runs of each story end beside healthy (else repaired) ones, a word for each line of the picture's table.
ENDS = {
    "01": "below below among -",
    "02": "below below among -",
    "03": "below among -",
    "05": "below below - among",
    "08": "below below among -",
    "09": "below above -",
    "10": "among below among -",
    "11": "below below -",
    "12": "below among among -",
    "13": "above among among -",
    "14": "below among -",
}


def test_the_stories_end_as_their_pages_say():
    """The sentences beside each picture rest on these words; that they come out again is compared at each run."""
    for notebook in course.notebooks():
        outputs = [output.get("data", {}) for cell in notebook.code for output in cell.outputs]
        tables = [data["text/plain"] for data in outputs if data.get("text/plain", "").startswith("runs  ")]
        if notebook.name[:2] not in ENDS:
            assert not tables, notebook.name
            continue
        lines = tables[-1].splitlines()[2:]
        places = [re.search(r"(below|above) all of them$|(among) them$", line) for line in lines]
        found = " ".join(place[1] or place[2] if place else "-" for place in places)
        assert found == ENDS[notebook.name[:2]], (notebook.name, tables[-1])


@pytest.mark.parametrize("notebook", course.notebooks(), ids=lambda each: each.name)
def test_a_notebook_knows_where_it_measures(notebook):
    """No figure of a GPU, or of a simulation, is shown or recorded as the CPU's: set-up says what `auto` means.

    No tier is typed, and a record without a device would count as the CPU's.
    """
    code = "\n".join(cell.source for cell in notebook.code)
    assert re.search(r"^device = notebook\.setup\(", code, re.MULTILINE)
    assert not re.search(r"tier: (cpu|gpu)", code)
    shared = re.findall(r"^(\w+) = \{[^}]*(?:\"device\": device|\"tier\": \"simulated\")[^}]*\}", code, re.MULTILINE)
    for call in re.findall(r"observe\.record\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", code):
        assert "device=device" in call or "tier=" in call or any(f"**{name}" in call for name in shared), call


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_the_figures_tell_the_story(ran, name):
    check_figures(ran[name], course.DEFAULTS["seed"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_another_seed_measures_the_same_story(ran_again, name):
    """A verdict, a prediction or a sentence that one of five seeds refutes is no part of the story."""
    seed, results = ran_again
    check_figures(results[name], seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_the_stored_verdicts_come_out_again(ran, name, request, monkeypatch):
    if ran[name].status in ("NOT RUN", "ENVIRONMENT"):
        pytest.skip(f"{ran[name].status}, see the test above")
    (notebook,) = course.find([name])
    differences = compare(notebook.path, ran[name].copy, request, monkeypatch)
    assert [text for text in differences if text] == []
    assert len(differences) == sum(stored.CHECKED in stored.tags(cell) for cell in notebook.code) > 0


def test_a_verdict_that_changed_is_found(plant, tmp_path, request, monkeypatch):
    """The comparison is alive: a stored verdict that no longer comes out fails, an unmarked output may differ."""
    path = plant("00_one", "print('healthy')", "print('unmarked')")
    made = json.loads(path.read_text())
    made["cells"][2]["metadata"]["tags"] = [stored.CHECKED]
    for count, (cell, said) in enumerate(zip(made["cells"][1:], ("", "healthy\n", "unmarked\n")), 1):
        cell["execution_count"] = count
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": said}] if said else []
    executed = tmp_path / path.name
    executed.write_text(json.dumps(made))
    for old, new in ((" ", " "), ("unmarked\\n", "something else\\n")):
        path.write_text(json.dumps(made).replace(old, new))
        assert compare(path, executed, request, monkeypatch) == [""]
    path.write_text(json.dumps(made).replace("healthy\\n", "red flag\\n"))
    (difference,) = compare(path, executed, request, monkeypatch)
    assert "red flag" in difference and "healthy" in difference
