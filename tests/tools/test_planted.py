"""The planted defects fit the tree: each can be planted where its line says, and its test is there."""

import pathlib

import pytest
from tools import planted

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("defect", planted.read_defects(), ids=lambda defect: defect.id)
def test_each_defect_can_be_planted(defect):
    """A change that moves the text has to move the line of the list: `make planted` would try nothing."""
    planted.check_defect(defect, ROOT)


@pytest.mark.parametrize("change", [{"old": "no such text"}, {"old": "1"}, {"test": "test_gone.py"}], ids=str)
def test_a_stale_defect_is_found(tmp_path, change):
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    (tmp_path / "test_code.py").touch()
    defect = {"id": "one", "room": "r", "breaks": "b", "file": "code.py", "old": "a = 1", "new": "a = 2"}
    entry = planted.Defect(**defect | {"test": "test_code.py"} | change)
    with pytest.raises(planted.StaleDefect):
        planted.check_defect(entry, tmp_path)
