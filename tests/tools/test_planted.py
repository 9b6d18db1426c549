"""The planted defects fit the tree: each can be planted where its line says, and its test is there."""

import os
import pathlib
import subprocess

import pytest
from tools import planted

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("defect", planted.read_defects(), ids=lambda defect: defect.id)
def test_each_defect_can_be_planted(defect):
    """A change that moves the text has to move the line of the list: `make planted` would try nothing."""
    planted.check_defect(defect, ROOT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "no such text"}, "one: its old text stands 0 times in code.py, not once"),
        ({"old": "1"}, "one: its old text stands 2 times in code.py, not once"),
        ({"file": "gone.py"}, "one: gone.py is not there"),
        ({"test": "test_gone.py"}, "one: test_gone.py is not there"),
        ({"new": "a = 1"}, "one: its old and its new text are the same"),
    ],
)
def test_a_stale_defect_is_one_line(tmp_path, change, message):
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    (tmp_path / "test_code.py").touch()
    defect = {"id": "one", "room": "r", "breaks": "b", "file": "code.py", "old": "a = 1", "new": "a = 2"}
    entry = planted.Defect(**defect | {"test": "test_code.py"} | change)
    with pytest.raises(planted.StaleDefect, match=f"^{message}$"):
        planted.check_defect(entry, tmp_path)


@pytest.mark.parametrize(
    ("target", "command"), [("planted", "planted.py "), ("pack", "pack.py grpo-failure-lab-offline ")]
)
def test_what_make_evidence_takes_is_its_own(target, command):
    """Its defaults once stood in ONLY and OUT, which other targets read: `make planted` looked for benchmarks."""
    commands = ["make", "--no-print-directory", "--dry-run", "-o", "setup", "-o", "here", target]
    environment = {name: value for name, value in os.environ.items() if name not in ("ONLY", "OUT", "MAKEFLAGS")}
    done = subprocess.run(commands, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n").endswith(f"tools/{command}")
