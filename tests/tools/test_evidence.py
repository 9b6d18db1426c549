"""The files under evidence/, how a benchmark writes its own, and the tables and pictures that are made from them."""

import importlib.metadata
import json
import pathlib

import matplotlib.colors
import pytest
from packaging.version import Version
from PIL import Image
from tests.cli.benchmark_scripts import load
from tools import tables

from failurelab.failures import atlas
from failurelab_course import eras
from failurelab_course.experiments import observe
from failurelab_course.notebook.pictures import losses

ROOT = eras.root()
recording, frames = load("recording"), load("frames")
FILES = sorted(path for path in (ROOT / "evidence").glob("*/*.json") if path.stem != "steps")
# Written by something else than a benchmark of that name: a class on one server, and what the notebooks
# recorded in their run on a card.
OTHERS = {"class_server", "notebooks"}


def make_record(case="GRPO learns sums", era="today", seed=0, **changes):
    figures = {"sampled_before": 0.4, "sampled_after": 0.7, "seconds": 9.0}
    return observe.record("ground", "measured", figures, case=case, seed=seed) | {"era": era} | changes


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


@pytest.mark.parametrize("path", (ROOT / "evidence" / "atlas").glob("*.jsonl"), ids=lambda path: path.stem)
def test_a_line_of_the_atlas_says_what_was_measured_in_a_stack(path):
    records = [json.loads(line) for line in path.open(encoding="utf-8")]
    versions = [Version(record["stack"].removeprefix(f"{path.stem}-")) for record in records]
    assert versions == sorted(set(versions)), "each once, by release"
    for record in records:
        if "probes" not in record:
            assert record["could_not_be_installed"], record["stack"]
            continue
        for package, version in record["pinned"].items():
            assert record["versions"][package] == version
        assert all(probe["said"] and probe["state"] in atlas.STATES for probe in record["probes"])


@pytest.mark.slow
def test_the_tables_of_the_pages_are_those_of_the_evidence():
    """They are written by `make tables`, and by nothing else; and every table is shown."""
    made, texts = tables.make_tables(), {page: page.read_text(encoding="utf-8") for page in tables.find_pages()}
    assert [page for page, text in texts.items() if tables.update_tables(text, made) != text] == []
    assert [name for name in made if f"<!-- table: {name} -->" not in "".join(texts.values())] == []


def test_a_misspelt_table_is_refused():
    with pytest.raises(tables.UnknownTable, match="unknown table 'lerning'"):
        tables.update_tables("<!-- table: lerning -->\n<!-- end table -->", {})


@pytest.mark.parametrize("picture", tables.PICTURES)
def test_a_picture_shows_the_evidence(picture):
    assert Image.open(ROOT / "evidence" / picture).info["Description"] == tables.make_digest(picture)


def test_the_map_of_losses_has_the_worst_of_each_group_and_all_counts(tmp_path):
    """The newest release that ran stands for its library; a cell is coloured by its worst case, and says all."""

    def library(release, **counts):
        none = dict.fromkeys(losses.STATES, [0] * len(losses.COLUMNS))
        figures = none | {status: [count] * len(losses.COLUMNS) for status, count in counts.items()}
        return {"case": f"library: verl {release}", "figures": figures | {"reason": "" if counts else "no wheel"}}

    path = tmp_path / "known_gradients.json"
    records = [library("1.0", agrees=9), library("1.1", agrees=2, differs=1), library("1.2")]
    path.write_text(json.dumps({"records": records}), encoding="utf-8")
    newest = losses.read_newest(path)
    assert newest == {"verl\n1.1": [{"differs": 1, "agrees": 2}] * len(losses.COLUMNS)}
    (axes,) = losses.draw_losses(newest).axes
    assert {text.get_text() for text in axes.texts} == {"1 differs\n2 agree"}
    assert {matplotlib.colors.to_hex(patch.get_facecolor()) for patch in axes.patches} == {losses.STATES["differs"][1]}


def test_what_a_benchmark_recorded_is_read_again(tmp_path):
    """What an era ran on is said once; a record on something else says so itself; each is a line, for a diff."""
    records = [make_record(), make_record(seed=1), make_record(seed=2, tier="simulated"), make_record(era="trl-0.14")]
    path = tmp_path / "learning.json"
    recording.write_file(path, records, [{"era": "trl-0.15", "reason": "not made"}])
    read = recording.read_file(path)
    assert [record["tier"] for record in read] == ["cpu", "cpu", "simulated", "cpu"]
    assert [record["figures"] for record in read] == [record["figures"] for record in records]
    assert [record["seed"] for record in read] == [0, 1, 2, 0]
    assert len([line for line in path.read_text().splitlines() if '"case"' in line]) == 4
    assert "| today | 0.40 | 0.70 | 3 of 3 seeds |" in frames.make_tables(path)["learning"]


@pytest.mark.parametrize("text", ["[]", '{"eras": {}, "records": [{"era": "today"}]}', "{"])
def test_a_file_that_is_none_is_named(tmp_path, text):
    path = tmp_path / "learning.json"
    with pytest.raises(recording.EvidenceError, match=r"is not there\. Next: python benchmarks/learning\.py"):
        recording.read_file(path)
    path.write_text(text)
    with pytest.raises(recording.EvidenceError, match=r"learning\.json is no benchmark's file"):
        recording.read_file(path)


def record(folder, body, *names, chosen=None, add=False):
    """Run a script as a benchmark of these eras, into the folder; return the exit status."""
    script = folder / "planted.py"
    script.write_text(body)
    docstring = f"Planted.\n\nEras: {', '.join(names)}.\n"
    return recording.record_in_eras(script, docstring, [], "cpu", folder / "out", chosen, add)


def test_an_era_that_is_run_alone_leaves_the_others_records(tmp_path):
    """Each era's own libraries made its record."""
    line = json.dumps(make_record(era="ERA", versions={"trl": "TRL", "torch": "2"}))
    body = "import importlib.metadata, os, pathlib\n"
    body += f"line = {line!r}.replace('ERA', os.environ['FAILURELAB_ERA'])\n"
    body += "line = line.replace('TRL', importlib.metadata.version('trl'))\n"
    body += "pathlib.Path(os.environ['FAILURELAB_EVIDENCE'], '1.jsonl').write_text(line)"
    assert record(tmp_path, body, "trl-0.14", "today") == 0
    there = recording.read_file(tmp_path / "out" / "planted.json")
    today = importlib.metadata.version("trl")
    assert [(kept["era"], kept["versions"]["trl"]) for kept in there] == [("trl-0.14", "0.14.0"), ("today", today)]
    assert record(tmp_path, body.replace("sampled", "other"), "trl-0.14", "today", chosen=["today"]) == 0
    kept, new = recording.read_file(tmp_path / "out" / "planted.json")
    assert kept == there[0] and set(new["figures"]) == {"other_before", "other_after", "seconds"}


def test_a_case_that_is_measured_again_leaves_the_others_records(tmp_path):
    body = "import os, pathlib\npathlib.Path(os.environ['FAILURELAB_EVIDENCE'], '1.jsonl').write_text({!r})"
    first, second, again = (json.dumps(make_record(case=case, seed=seed)) for case, seed in zip("aba", (0, 1, 2)))
    for line in (first, second, again):
        assert record(tmp_path, body.format(line), "today", add=True) == 0
    kept = {(each["case"], each["seed"]) for each in recording.read_file(tmp_path / "out" / "planted.json")}
    assert kept == {("a", 2), ("b", 1)}
    assert record(tmp_path, body.format(first), "today") == 0
    assert len(recording.read_file(tmp_path / "out" / "planted.json")) == 1


@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        ("raise SystemExit('it broke')", 1, "it failed in era today (exit status 1):\nit broke"),
        ("", 1, "it ended well in era today and recorded nothing"),
        ("print('NOT RUN: no index is reached'); raise SystemExit(4)", 4, "NOT RUN planted in era today: no index"),
        ("raise ImportError(\"No module named 'deepspeed'\")", 4, "NOT RUN planted in era today: ImportError"),
    ],
)
def test_what_fails_is_told_from_what_cannot_run_and_nothing_is_written(tmp_path, capsys, body, status, line):
    found = record(tmp_path, body, "today")
    said = "".join(capsys.readouterr())
    assert (found, line in said) == (status, True), said
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="4"):
        recording.end_not_run("no index is reached")
    assert capsys.readouterr().out == "NOT RUN: no index is reached\n"


def test_an_era_that_is_not_made_or_lacks_zero3_is_not_run(tmp_path, monkeypatch):
    era = eras.Era("old", "old", tmp_path / "old.txt", tmp_path)
    monkeypatch.setattr(eras, "find", lambda name, ready=True: era)
    monkeypatch.setattr(eras.Era, "status", "missing")
    with pytest.raises(recording.CannotRun, match="era old is not made here"):
        recording.run_in_era(pathlib.Path("x.py"), "old", [], [], "cpu")
    monkeypatch.setattr(eras.Era, "status", "ready")
    monkeypatch.setattr(eras.Era, "has_zero3", False)
    with pytest.raises(recording.CannotRun, match="not built in era old"):
        recording.run_in_era(pathlib.Path("x.py"), "old", ["zero3"], [], "cpu")


def test_a_benchmark_started_by_hand_records_its_own_era(tmp_path, monkeypatch):
    """An era's interpreter without the variables of an era has its name all the same."""
    monkeypatch.delenv("FAILURELAB_ERA", raising=False)
    for folder, era in ((".eras/trl-0.14", "trl-0.14"), (".venv", "today")):
        monkeypatch.setattr("sys.prefix", str(tmp_path / folder))
        assert observe.record("F7", "broken", {"first": 0.2}, case="planted")["era"] == era
    monkeypatch.setenv("FAILURELAB_ERA", "trl-0.22")
    assert observe.era() == "trl-0.22"
