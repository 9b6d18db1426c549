"""A round of tests is recorded by its code, and one that failed once is named in every round after it."""

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
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # nbval and others take seconds to import
    (tmp_path / "test_one.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(tmp_path, "test_one.py")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "PYTEST", ("-m", "pytest", "-q"))  # two tests need no workers
    monkeypatch.setattr(tool, "FOLDER", tmp_path / ".course" / "flakes")
    monkeypatch.setattr(tool, "RECORD", tmp_path / "evidence" / "cpu" / "flakes.jsonl")
    return tool


def commit(folder, *paths):
    subprocess.run(["git", "add", *paths], cwd=folder, check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"], cwd=folder, check=True)


def test_a_failure_of_one_round_stays_on_record(flakes, capfd):
    """Two rounds, with a commit of the first's record: the second is green, and the status is 1 all the same."""
    assert flakes.main([]) == 1
    commit(flakes.ROOT, "evidence")
    assert flakes.main([]) == 1
    assert "2 of 10 rounds" in capfd.readouterr().out
    first, second = map(json.loads, flakes.RECORD.read_text().splitlines())
    assert first["failed"] == ["test_one::test_now_and_then"] and second["failed"] == [] and second["tests"] == 2
    assert first["code"] == second["code"] and first["commit"] != second["commit"]


def test_rounds_of_other_code_and_of_some_tests_are_counted_apart(flakes, capfd):
    assert flakes.main([]) == 1
    (flakes.ROOT / "test_one.py").write_text(TESTS + "def test_more():\n    pass\n")
    commit(flakes.ROOT, "test_one.py")
    assert flakes.main(["test_one.py"]) == 0 and flakes.main([]) == 0
    assert capfd.readouterr().out.count("1 of 10 rounds") == 3
    assert len(flakes.RECORD.read_text().splitlines()) == 2


def test_a_tree_with_changes_is_refused(flakes, capfd):
    (flakes.ROOT / "test_one.py").write_text("")
    assert flakes.main([]) == 2
    assert "git commit" in capfd.readouterr().err and not flakes.FOLDER.exists()
