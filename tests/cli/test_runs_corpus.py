"""The corpora: every listed run and script is whole, and nothing in the archives says where it was made."""

import json
import re

import pytest
import tomllib
from tests.cli.benchmark_scripts import FOLDER, load

CORPUS = load("runs_corpus")
ARCHIVES = load("archives")
PARTS = ("first", "fresh", "third")
MACHINE = re.compile(
    r"/(work|tmp|root|home|usr|opt)/|[\w.-]+@[\w-]+\.\w+|https?://(?!huggingface\.co|github\.com|docs\.)\S+"
)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_what_its_list_says(part, tmp_path):
    folder = ARCHIVES.unpack(FOLDER / "training_runs" / f"{part}.tar.xz", tmp_path)
    runs = tomllib.loads((FOLDER / "training_runs" / f"{part}.toml").read_text())["run"]
    variants = {variant["name"]: variant for variant in CORPUS.read_variants()} if part == "first" else {}
    assert sorted(run["name"] for run in runs) == sorted(path.name for path in folder.iterdir())
    for run in runs:
        files = {path.name: path.read_text() for path in (folder / run["name"]).iterdir()}
        assert {"train.py", "versions.txt"} <= files.keys()
        if variant := variants.get(run["variant"]):
            assert (variant["expected"], CORPUS.script_of(variant, run["seed"])) == (run["expected"], files["train.py"])
            if "error" in variant:
                assert re.search(variant["error"], files["log.txt"])
            else:
                assert json.loads(files["trainer_state.json"])["log_history"]
        assert not [name for name, text in files.items() if MACHINE.search(text)]
