"""The files under evidence/, and the tables and pictures that are made from them."""

import json

import pytest
from PIL import Image
from tests.cli.benchmark_scripts import load
from tools import tables

from failurelab_course import eras
from failurelab_course.experiments import observe

ROOT = eras.root()
recording = load("recording")
FILES = sorted(path for path in (ROOT / "evidence").glob("*/*.json") if path.stem != "steps")
# Written by something else than a benchmark of that name: a class on one server, and what the notebooks
# recorded in their run on a card.
OTHERS = {"class_server", "notebooks"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_says_what_ran_where(path):
    content = json.loads(path.read_text())
    assert content["benchmark"] == path.stem
    assert path.stem in OTHERS or (ROOT / "benchmarks" / f"{path.stem}.py").exists()
    records = recording.read_file(path)
    for record in records:
        assert record["tier"] in (*observe.TIERS[: 1 + (path.parent.name != "cpu")], "simulated")
        assert record["device"] and record["versions"]["torch"] and record["figures"]
        assert record["state"] in observe.STATES
    keys = [(record["case"], record["era"], record.get("seed")) for record in records]
    assert len(set(keys)) == len(keys) > 0


@pytest.mark.slow
def test_the_tables_of_the_pages_are_those_of_the_evidence():
    """They are written by `make tables`, and by nothing else; and every table is shown."""
    made, texts = tables.make_tables(), {page: page.read_text(encoding="utf-8") for page in tables.find_pages()}
    assert [page for page, text in texts.items() if tables.update_tables(text, made) != text] == []
    assert [name for name in made if f"<!-- table: {name} -->" not in "".join(texts.values())] == []


@pytest.mark.parametrize("picture", tables.PICTURES)
def test_a_picture_shows_the_evidence(picture):
    assert Image.open(ROOT / "evidence" / picture).info["Description"] == tables.make_digest(picture)


def record(folder, body, add=False):
    """Run a script as a benchmark of this stack, into the folder; return the exit status."""
    script = folder / "planted.py"
    script.write_text(body)
    return recording.record_in_eras(script, "Planted.\n\nEras: today.\n", [], "cpu", folder / "out", None, add)


def test_a_case_that_is_measured_again_leaves_the_others_records(tmp_path):
    body = "import os, pathlib\npathlib.Path(os.environ['FAILURELAB_EVIDENCE'], '1.jsonl').write_text({!r})"
    for case, seed in zip("aba", (0, 1, 2)):
        line = observe.record("ground", "measured", {"n": 1}, case=case, seed=seed) | {"era": "today"}
        assert record(tmp_path, body.format(json.dumps(line)), add=True) == 0
    kept = {(each["case"], each["seed"]) for each in recording.read_file(tmp_path / "out" / "planted.json")}
    assert kept == {("a", 2), ("b", 1)}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("raise SystemExit('it broke')", 1),
        ("", 1),  # it ended well and recorded nothing
        ("print('NOT RUN: no index is reached'); raise SystemExit(4)", 4),
        ("raise ImportError(\"No module named 'deepspeed'\")", 4),
    ],
)
def test_what_fails_is_told_from_what_cannot_run_and_nothing_is_written(tmp_path, body, status):
    assert record(tmp_path, body) == status
    assert not (tmp_path / "out").exists()
