"""The command that compares today's answers with those that were written down."""

import json

import pytest
from tools import goldens

HELD = {"named": [], "suspected": [], "held": ["F1"], "not_checked": [], "judged": True}
NAMED = HELD | {"named": ["F7"]}


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """Return a function that runs the command on answers of preflight that stand in for those of a corpus."""
    monkeypatch.setattr(goldens, "FOLDER", tmp_path)
    goldens.write_part("first", {"one": HELD, "two": NAMED})

    def run(monkeypatch, now, *words):
        monkeypatch.setattr(goldens, "ask_preflight", lambda part, only, once: now)
        monkeypatch.setattr("sys.argv", ["goldens", *words])
        return goldens.main()

    return run


def test_what_changed_is_printed_and_is_no_success(monkeypatch, capsys, answers):
    assert answers(monkeypatch, {"one": HELD, "two": NAMED}) == 0
    assert answers(monkeypatch, {"one": NAMED, "two": NAMED}) == 1
    assert "one: was named -" in capsys.readouterr().out
    assert answers(monkeypatch, {"one": HELD}) == 1
    assert "two: is no longer asked" in capsys.readouterr().out
    assert answers(monkeypatch, {"one": HELD}, "--only", "one") == 0


def test_what_is_wanted_is_written_and_nothing_else(monkeypatch, answers, tmp_path):
    answers(monkeypatch, {"one": NAMED}, "--only", "one", "--write")
    assert json.loads((tmp_path / "first.json").read_text()) == {"one": NAMED, "two": NAMED}
    with pytest.raises(SystemExit) as ended:
        answers(monkeypatch, {}, "--once", "--write")
    assert ended.value.code == 2


def test_without_repairs_what_is_named_is_suspected(monkeypatch, answers):
    suspected = HELD | {"suspected": ["F7"]}
    assert answers(monkeypatch, {"one": HELD, "two": suspected}, "--once") == 0
    assert answers(monkeypatch, {"one": HELD, "two": suspected}) == 1


def test_a_part_that_is_not_known_is_a_wrong_call(monkeypatch, answers, capsys):
    with pytest.raises(SystemExit) as ended:
        answers(monkeypatch, {}, "frist")
    assert ended.value.code == 2 and "first" in capsys.readouterr().err
