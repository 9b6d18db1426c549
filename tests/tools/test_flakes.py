"""A round of tests is recorded by commit, and one that failed once is named in every round after it."""

import json
import subprocess

import pytest
from tools import flakes as tool

TESTS = """import pathlib
def test_now_and_then():
    mark = pathlib.Path(__file__).with_name("second")
    first = not mark.exists()
    mark.touch()
    assert not first
def test_always():
    pass
"""


@pytest.fixture
def flakes(tmp_path, monkeypatch):
    """The tool, on a repository of its own with two tests, of which one fails the first time."""
    (tmp_path / "test_one.py").write_text(TESTS)
    for words in (
        ["init", "-q"],
        ["add", "test_one.py"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "FOLDER", tmp_path / ".course" / "flakes")
    return tool


def test_a_failure_of_one_round_stays_on_record(flakes, capfd):
    """Two rounds at one commit: the second is green, and the status is 1 all the same."""
    assert flakes.main([]) == 1
    assert flakes.main([]) == 1
    assert "2 of 10 rounds" in capfd.readouterr().out
    (record,) = flakes.FOLDER.glob("*.jsonl")
    first, second = map(json.loads, record.read_text().splitlines())
    assert first["failed"] == ["test_one::test_now_and_then"] and second["failed"] == [] and second["tests"] == 2


def test_a_tree_with_changes_is_refused(flakes, capfd):
    (flakes.ROOT / "test_one.py").write_text("")
    assert flakes.main([]) == 2
    assert "git commit" in capfd.readouterr().err and not flakes.FOLDER.exists()
