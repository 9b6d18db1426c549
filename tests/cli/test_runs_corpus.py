"""The corpus of runs: every listed run is whole, small, and says nothing of the machine that it was made on."""

import json
import re

import pytest
import tomllib
from tests.cli.benchmark_scripts import FOLDER, load

CORPUS = load("runs_corpus")
HALVES = ("first", "fresh", "third")
LISTED = {half: tomllib.loads((FOLDER / "runs" / f"{half}.toml").read_text()) for half in HALVES}
RUNS = [{"half": half, **run} for half in HALVES for run in LISTED[half]["run"]]
VARIANTS = {half: {each["name"]: each for each in CORPUS.read_variants(half)} for half in HALVES}
CAUSES = ("F1", "F3b", "F7", "F9", "F10", "F11", "F12", "F13", "F14", "F16", "learning_rate")
MACHINE = re.compile(
    r"/(work|tmp|root|home|usr|opt)/|[\w.-]+@[\w-]+\.\w+|https?://(?!huggingface\.co|github\.com|docs\.)\S+"
)


def variants_of(cause):
    """Return the variants whose first cause this is, of the half that the rules were written on."""
    return {run["variant"] for run in LISTED["first"]["run"] if run["expected"][:1] == [cause]}


def test_the_list_and_the_folders_agree():
    """No run is listed twice, none is missing, and none lies there unlisted."""
    names = [(run["half"], run["name"]) for run in RUNS]
    assert len(names) == len(set(names))
    assert sorted(names) == sorted((half, path.name) for half in HALVES for path in (FOLDER / "runs" / half).iterdir())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_a_run_has_its_files(run):
    """The script is the one that its variant makes, the state can be read, and no file names a place on a machine."""
    folder = FOLDER / "runs" / run["half"] / run["name"]
    files = {path.name: path.read_text() for path in folder.iterdir()}
    assert {"train.py", "versions.txt"} <= set(files)
    variant = VARIANTS[run["half"]][run["variant"]]
    assert files["train.py"] == CORPUS.script_of(variant, run["seed"])
    assert "failurelab" not in files["train.py"]
    compile(files["train.py"], "train.py", "exec")
    assert variant["expected"] == run["expected"]
    if "error" in variant:
        assert re.search(variant["error"], files["log.txt"])
    else:
        history = json.loads(files["trainer_state.json"])["log_history"]
        assert 1 <= len([row for row in history if "reward" in row]) <= 100
        assert {"tensors_changed", "elements_changed", "dtypes"} <= set(json.loads(files["probes.json"]))
    assert len(files.get("completions.jsonl", "").splitlines()) <= 24
    assert len(files.get("log.txt", "")) <= 8000
    assert not [name for name, text in files.items() if MACHINE.search(text)]


@pytest.mark.parametrize("half", HALVES[:2])
def test_enough_healthy_runs(half):
    """A third of the runs are healthy, thirty at least, and most of these look odd; the third part is smaller."""
    healthy = [run for run in LISTED[half]["run"] if not run["expected"]]
    assert len(healthy) >= max(30, len(LISTED[half]["run"]) / 3)
    assert sum(run["odd"] for run in healthy) >= 20


def test_two_variants_of_each_cause():
    """A cause in one variant alone would be learned by heart; and no variant stands in both halves."""
    assert {cause: len(variants_of(cause)) for cause in CAUSES if len(variants_of(cause)) < 2} == {}
    names = [name for half in HALVES for name in VARIANTS[half]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("half", HALVES)
def test_every_broken_variant_was_reproduced(half):
    """What does not differ from its clean twin by three times the seeds' spread leaves no runs."""
    listed, runs = LISTED[half], LISTED[half]["run"]
    reproduced = {row["variant"]: row for row in listed["reproduced"]}
    assert {run["variant"] for run in runs if run["expected"]} == set(reproduced)
    for row in reproduced.values():
        assert "error" in row or row["difference"] > CORPUS.TIMES * row["spread"]
    assert not {row["variant"] for row in listed.get("dropped", [])} & {run["variant"] for run in runs}


@pytest.mark.parametrize("half", HALVES)
def test_the_corpus_is_small(half):
    """A clone carries it."""
    sizes = [path.stat().st_size for path in (FOLDER / "runs" / half).rglob("*") if path.is_file()]
    assert sum(sizes) < 2_800_000
    assert max(sizes) < 60_000
