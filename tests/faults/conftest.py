"""What every fault's test works with: a learner's clone, commands in it, and what is looked at after the fault.

A test makes its fault happen for real, in a clone with a learner's work in it. When it ends, its `case` has asked for
what is left: processes that carry the test's mark, files that are half written, temporary files, work that is gone.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import uuid

import psutil
import pytest

from failurelab_course import eras
from failurelab_course.labs import definition as lab_files

ROOT = eras.root()
MARK = "FAILURELAB_FAULT"  # in the environment of everything that a test starts
PATIENCE = 60  # seconds for what is ending by itself; no test waits for it to pass
LIMIT = 300  # seconds until a test gives up on a command
LAB = "08_scoring_by_hand"  # it takes a second


def notebook(*sources):
    """Return a notebook's text, a cell for each source."""
    cells = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
        for n, source in enumerate(sources)
    ]
    return json.dumps({"metadata": {}, "nbformat": 4, "nbformat_minor": 5, "cells": cells})


class Room:
    """A learner's clone: everything but the labs, the notebooks and the learner's files is a link to this one."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        folder.mkdir(parents=True)
        for path in ROOT.iterdir():
            if path.name not in ("labs", "notebooks", ".git", ".course", ".pytest_cache", ".hypothesis", "models"):
                (folder / path.name).symlink_to(path)
        shutil.copytree(ROOT / "models" / "tiny-qwen2", folder / "models" / "tiny-qwen2")
        self.lab = folder / "labs" / LAB
        shutil.copytree(ROOT / "labs" / LAB, self.lab)
        self.script = self.lab / "train.py"
        self.script.write_text(lab_files.load(self.lab).solution.text() + "# my own line\n")
        (folder / ".course").mkdir()
        (folder / "notebooks").mkdir()
        self.state = folder / ".course" / "labs.json"
        self.notebook = folder / "notebooks" / "01_mine.ipynb"
        solved = {"started": "2026-01-01T10:00:00+00:00", "solved": "2026-01-01T10:20:00+00:00", "checks": 3}
        self.progress = solved | {"hints": 2, "wrong_fixes": [], "solution_seen": False}
        self.state.write_text(json.dumps({"schema": 1, "labs": {"02_done": self.progress}}))
        self.notebook.write_text(notebook("mine = 1"))

    def kept(self) -> dict[str, bytes]:
        """Return the learner's files that a fault must leave as they are."""
        return {path.name: path.read_bytes() for path in (self.script, self.notebook)}

    def half_written(self) -> list[str]:
        """Return files and folders that something left in the making."""
        folders = [self.folder / top for top in ("labs", ".course", "notebooks", "results", ".eras")]
        own = [folder for folder in folders if not folder.is_symlink()]
        return [str(path) for folder in own for path in folder.rglob("*") if "partial" in path.name]


class Done:
    def __init__(self, status: int, text: str):
        self.status, self.text = status, text

    def line(self, words: str) -> str:
        """Return the line that holds these words (a regular expression); there must be no traceback."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self.text)
        plain = re.sub(r"\n  (?=\S)", " ", plain)  # what preflight has wrapped
        lines = [" ".join(line.split()) for line in plain.splitlines() if re.search(words, line)]
        assert lines, f"no line has {words!r}:\n{plain}"
        assert "Traceback (most recent call last)" not in plain, plain
        return lines[-1]

    def shows(self, words: str, status: int) -> None:
        """Hold the exit status, and a line that was shown; one that was killed (-9) shows nothing."""
        assert self.status == status, f"exit status {self.status}, not {status}:\n{self.text}"
        assert status == -9 or self.line(words)


class Case:
    """One fault: commands that meet it, and what was left after."""

    def __init__(self, room: Room, temporary: pathlib.Path):
        self.room, self.temporary = room, temporary
        self.mark = uuid.uuid4().hex
        self.kept = room.kept()
        self.is_over = False

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables of a command in the clone; a value of None takes one away."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("FAILURELAB")}
        variables |= {MARK: self.mark, "FAILURELAB_ROOT": str(self.room.folder), "TMPDIR": str(self.temporary)}
        variables |= {"COLUMNS": "400", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "PYTEST_CURRENT_TEST": None} | more
        return {name: value for name, value in variables.items() if value is not None}

    def start(self, *words, env=None) -> subprocess.Popen:
        """Start `failurelab WORDS` in the clone, or another command where the first word is a path."""
        words = list(map(str, words))
        command = words if "/" in words[0] else [sys.executable, "-m", "failurelab", *words]
        return subprocess.Popen(
            command,
            env=self.environment(**(env or {})),
            cwd=self.room.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen) -> Done:
        """Wait for a command."""
        text, _ = process.communicate(timeout=LIMIT)
        return Done(process.returncode, text)

    def run(self, *words, **options) -> Done:
        return self.end(self.start(*words, **options))

    def left(self) -> list[str]:
        """Return the processes of this fault that do not end by themselves."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.Error, OSError):
                pass
        _, left = psutil.wait_procs(found, timeout=PATIENCE)
        left = [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        names = [f"{process.pid} {' '.join(process.cmdline())[:100]}" for process in left]
        for process in left:
            process.kill()
        return names

    def look(self) -> None:
        """Hold what is left after the fault."""
        self.is_over = True
        assert self.left() == []
        assert self.room.kept() == self.kept
        assert json.loads(self.room.state.read_text())["labs"]["02_done"] == self.room.progress
        assert self.room.half_written() == []
        assert [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.fixture
def room(tmp_path, request):
    """A learner's clone; its folder's name is the parameter, where the fault is the path."""
    return Room(tmp_path / getattr(request, "param", "course"))


@pytest.fixture
def case(room):
    """The fault of this test, looked at when the test is over."""
    # Short, for a socket's path has some hundred bytes.
    case = Case(room, pathlib.Path(tempfile.mkdtemp(prefix="fl-", dir="/tmp")))
    yield case
    try:
        if not case.is_over:
            case.look()
    finally:
        shutil.rmtree(case.temporary, ignore_errors=True)


@pytest.fixture
def mount():
    """Return a function that mounts a small file system on a folder; NOT RUN where that needs other rights."""
    mounted = []

    def call(*words):
        return subprocess.run([*map(str, words)], capture_output=True, text=True)

    def make(folder: pathlib.Path, options: str):
        folder.mkdir(parents=True, exist_ok=True)
        done = call("mount", "-t", "tmpfs", "-o", options, "none", folder)
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here ({done.stderr.strip()}): it needs root")
        mounted.append(folder)
        return folder

    def again(folder, options):
        done = call("mount", "-o", f"remount,{options}", folder)
        assert done.returncode == 0, done.stderr

    def end(folder):
        mounted.remove(folder)
        assert call("umount", "--lazy", folder).returncode == 0

    make.again, make.end = again, end
    yield make
    for folder in reversed(list(mounted)):
        end(folder)
