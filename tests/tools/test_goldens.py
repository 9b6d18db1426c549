"""The command that compares today's answers with those that were written down."""

import pytest
from tools import goldens

HELD = {"named": [], "suspected": [], "held": ["F1"], "not_checked": [], "judged": True}
NAMED = HELD | {"named": ["F7"]}


@pytest.mark.parametrize(
    ("now", "words", "status"),
    [
        ({"one": HELD, "two": NAMED}, [], 0),
        ({"one": NAMED, "two": NAMED}, [], 1),
        ({"one": HELD}, [], 1),  # the other is no longer asked
        ({"one": HELD}, ["--only", "one"], 0),
        ({"one": HELD, "two": HELD | {"suspected": ["F7"]}}, ["--once"], 0),  # without repairs nothing is named
    ],
)
def test_an_answer_that_changed_is_no_success(now, words, status, monkeypatch, tmp_path):
    monkeypatch.setattr(goldens, "FOLDER", tmp_path)
    goldens.write_part("first", {"one": HELD, "two": NAMED})
    before = (tmp_path / "first.json").read_bytes()
    monkeypatch.setattr(goldens, "ask_preflight", lambda part, only, once: now)
    monkeypatch.setattr("sys.argv", ["goldens", *words])
    assert goldens.main() == status
    assert (tmp_path / "first.json").read_bytes() == before
