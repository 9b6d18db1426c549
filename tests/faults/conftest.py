"""What every fault's test works with: a learner's clone, commands in it, and what is looked at after the fault.

A test makes its fault happen for real, in a clone with a learner's work in it. When it ends, its `case` has asked for
what is left: processes that carry the test's mark, files that are half written, temporary files, work that is gone.
What was shown and found goes into records, which docs/faults.md is made from.
"""

import ctypes
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid

import psutil
import pytest

from failurelab_course import eras
from failurelab_course.experiments import observe
from failurelab_course.ledger import records as evidence

ROOT = eras.root()
MARK = "FAILURELAB_FAULT"  # in the environment of everything that a test starts
PATIENCE = 60  # seconds for what is ending by itself; no test waits for it to pass
LIMIT = 300  # seconds until a test gives up on a command
LAB = "01_trivial"
LAB_TOML = """
id = "L01"
title = "A lab that takes a second"
symptom = "Nothing is wrong."
given = "symptom"
kind = "log_probs"
upstream = ["https://github.com/huggingface/trl"]
era = "today"
trainer = "log_probs"
needs = ["transformers.Qwen2ForCausalLM"]
measured = "scores"
difficulty = "easy"
minutes = 1
time_limit = 60
memory_limit = 1500
healthy = [{ check = "log_prob_error < 1e-4", holds = "scores are right", fails = "scores are wrong" }]
[broken]
reason = "none"
signature = ["log_prob_error > 1"]
[[wrong_fixes]]
name = "none"
reason = "none"
signature = ["log_prob_error > 1"]
edits = [["log_softmax(dim=-1)", "softmax(dim=-1)"]]
[solution]
edits = [["log_softmax(dim=-1)", "log_softmax(-1)"]]
"""
RIGHT = '''"""A lab that takes a second. Nothing is wrong."""


def log_probs(model, input_ids, attention_mask, completion_length):
    rows = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=completion_length + 1).logits
    rows = rows[:, -completion_length - 1 : -1].log_softmax(dim=-1)
    return rows.gather(-1, input_ids[:, -completion_length:, None])[..., 0]
'''
NOTEBOOK = {"metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def notebook(*sources):
    """Return a notebook's text, a cell for each source."""
    cells = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
        for n, source in enumerate(sources)
    ]
    return json.dumps(NOTEBOOK | {"cells": cells})


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
        self.lab.mkdir(parents=True)
        (self.lab / "lab.toml").write_text(LAB_TOML)
        (self.lab / "start.py").write_text(RIGHT)
        (self.lab / "hints.md").write_text("## One\na\n## Two\nab\n## Three\nabc\n")
        self.script = self.lab / "train.py"
        self.script.write_text(RIGHT + "# my own line\n")
        (folder / ".course").mkdir()
        (folder / "notebooks").mkdir()
        self.state = folder / ".course" / "labs.json"
        self.predictions = folder / ".course" / "predictions.json"
        self.notebook = folder / "notebooks" / "01_mine.ipynb"
        solved = {"started": "2026-01-01T10:00:00+00:00", "solved": "2026-01-01T10:20:00+00:00", "checks": 3}
        solved |= {"hints": 2, "wrong_fixes": [], "solution_seen": False}
        self.state.write_text(json.dumps({"schema": 1, "labs": {"02_done": solved}}))
        said = {"01-changed": {"said": "all", "came": None}}
        self.predictions.write_text(json.dumps({"schema": 1, "predictions": said}))
        self.notebook.write_text(notebook("mine = 1"))
        self.progress = json.loads(self.state.read_text())["labs"]["02_done"]

    def kept(self) -> dict[str, bytes]:
        """Return the learner's files that a fault must leave as they are."""
        return {path.name: path.read_bytes() for path in (self.script, self.predictions, self.notebook)}

    def half_written(self) -> list[str]:
        """Return files and folders that something left in the making."""
        return [
            str(path.relative_to(self.folder))
            for top in ("labs", ".course", "notebooks", "results")
            for path in (self.folder / top).rglob("*")
            if "partial" in path.name
        ]


class Done:
    """A command that has ended."""

    def __init__(self, status: int, out: str, err: str):
        self.status, self.out, self.err = status, out, err

    @property
    def text(self) -> str:
        """All that was printed."""
        return self.out + self.err

    def line(self, words: str) -> str:
        """Return the line that holds these words (a regular expression); there must be no traceback."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self.text)
        plain = re.sub(r"\n  (?=\S)", " ", plain)  # what preflight has wrapped
        lines = [" ".join(line.split()) for line in plain.splitlines() if re.search(words, line)]
        assert lines, f"no line has {words!r}:\n{plain}"
        assert "Traceback (most recent call last)" not in plain, plain
        return lines[-1]


class Case:
    """One fault: commands that meet it, what they showed, and what was left after."""

    def __init__(self, room: Room, temporary: pathlib.Path, what: str, how: str):
        self.room, self.temporary, self.what, self.how = room, temporary, what, how
        self.mark = uuid.uuid4().hex
        self.line, self.status, self.again = "", None, ""
        self.kept = room.kept()
        self.may_change: set[str] = set()  # files of the learner that the fault itself damaged

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables of a command in the clone; a value of None takes one away."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("FAILURELAB")}
        variables |= {MARK: self.mark, "FAILURELAB_ROOT": str(self.room.folder), "TMPDIR": str(self.temporary)}
        variables |= {"COLUMNS": "400", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "PYTEST_CURRENT_TEST": None} | more
        return {name: value for name, value in variables.items() if value is not None}

    def start(self, *words, prefix=(), env=None, **options) -> subprocess.Popen:
        """Start `failurelab WORDS` in the clone, or another command where the first word is a path."""
        words = list(map(str, words))
        command = words if "/" in words[0] else [sys.executable, "-m", "failurelab", *words]
        return subprocess.Popen(
            [*map(str, prefix), *command],
            env=self.environment(**(env or {})),
            cwd=self.room.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            **options,
        )

    def end(self, process: subprocess.Popen) -> Done:
        """Wait for a command."""
        out, err = process.communicate(timeout=LIMIT)
        return Done(process.returncode, out, err)

    def run(self, *words, **options) -> Done:
        """Run a command in the clone."""
        return self.end(self.start(*words, **options))

    def shows(self, done: Done, words: str, status: int | None = None) -> str:
        """Hold what a command showed and its exit status; both go into the table."""
        self.line, self.status = done.line(words), done.status
        if status is not None:
            assert done.status == status, f"exit status {done.status}, not {status}:\n{done.text}"
        return self.line

    def tells(self, line: object) -> None:
        """Hold a line that was shown in a notebook; there is no exit status."""
        self.line = " ".join(str(line).strip().splitlines()[0].split())

    def clean(self, done: Done, words: str, status: int = 0) -> None:
        """Hold that the second run is clean."""
        line = done.line(words)
        assert done.status == status, done.text
        self.again = line

    def clean_check(self, **options) -> None:
        """Check the lab once more: it passes."""
        self.clean(self.run("lab", "check", "01", **options), "^PASS lab 01")

    def left(self) -> list[str]:
        """Return the processes of this fault that do not end by themselves."""

        def mine():
            found = []
            for process in psutil.process_iter():
                try:
                    if process.pid != os.getpid() and process.environ().get(MARK) == self.mark:
                        found.append(process)
                except (psutil.Error, OSError):
                    pass
            return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

        _, left = psutil.wait_procs(mine(), timeout=PATIENCE)
        names = [f"{process.pid} {' '.join(process.cmdline())[:100]}" for process in left if process.is_running()]
        for process in left:
            process.kill()
        return names

    def look(self) -> None:
        """Hold what is left after the fault."""
        assert self.left() == []
        lost = [name for name, content in self.kept.items() if self.room.kept().get(name) != content]
        assert [name for name in lost if name not in self.may_change] == []
        if "labs.json" not in self.may_change:
            assert json.loads(self.room.state.read_text())["labs"]["02_done"] == self.room.progress
        assert self.room.half_written() == []
        assert [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.fixture
def room(tmp_path, request):
    """A learner's clone; its folder's name is the marker's, where the fault is the path."""
    return Room(tmp_path / getattr(request, "param", "course"))


@pytest.fixture
def case(room, request):
    """The fault of this test, looked at when the test is over, and kept as a record if all held."""
    what, how = request.node.get_closest_marker("fault").args
    # Short, for a socket's path has some hundred bytes.
    temporary = pathlib.Path(tempfile.mkdtemp(prefix="fl-", dir="/tmp"))
    case = Case(room, temporary, what, how)
    yield case
    try:
        failed = request.node.stash.get(FAILED, False)
        left = case.left() if failed else None
        if not failed:
            case.look()
            assert case.line and case.again, "a fault without a line, or without a second run"
            status = "" if case.status is None else case.status
            keep(what, how, line=hide(case.line, case), status=status, lost=0, left=0, again=hide(case.again, case))
        assert not left
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


FAILED = pytest.StashKey[bool]()


def hide(line: str, case: Case) -> str:
    """Return a line without the test's own paths and numbers of processes."""
    for path, name in ((case.room.folder, "COURSE"), (case.temporary, "TMP"), (pathlib.Path.home(), "~")):
        line = line.replace(str(path), name)
    line = re.sub(r"/tmp/pytest-of-[^ :,()]*", "FOLDER", line)
    line = re.sub(r"/\S*/site-packages/", "", line)
    return re.sub(r"(?<=127\.0\.0\.1:)\d+", "PORT", line)[:300]


def keep(what, how, **figures):
    """Keep a record of one fault."""
    os.environ["FAILURELAB_SOURCE"] = "faults"
    os.environ["FAILURELAB_EVIDENCE"] = str(ROOT / ".course" / "faults")
    try:
        observe.record("ground", "measured", {"how": how} | figures, case=f"fault: {what}")
    finally:
        del os.environ["FAILURELAB_EVIDENCE"], os.environ["FAILURELAB_SOURCE"]


def pytest_configure(config):
    config.addinivalue_line("markers", "fault(what, how): what happens, and how it is made to happen")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Tell a fault's fixture of a failure; what is skipped is NOT RUN in the table, and says why."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    marker = item.get_closest_marker("fault")
    if report.skipped and marker:
        keep(*marker.args, not_run=report.longrepr[2].removeprefix("Skipped: "))
    return report


def pytest_sessionfinish(session):
    """Keep all records in the ledger that LEDGER names, when every process of this command has ended."""
    if hasattr(session.config, "workerinput") or not os.environ.get("LEDGER"):
        return
    path = pathlib.Path(os.environ["LEDGER"])
    new = evidence.collect(ROOT / ".course" / "faults")
    evidence.write_ledger(path, evidence.merge_records(evidence.read_ledger(path), new))


@pytest.fixture
def gone():
    """Return a function that waits until processes have ended, and says which have not."""

    def wait(*pids):
        left = []
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            if not select.select([handle], [], [], PATIENCE)[0]:
                os.kill(pid, signal.SIGKILL)
                left.append(pid)
            os.close(handle)
        return left

    return wait


@pytest.fixture
def pipe(tmp_path):
    """Return the path of a named pipe, and a function that waits for what is written there."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read(process):
        """Wait for what is written there, as long as the process runs that is to write it."""
        with open(os.pidfd_open(process.pid)) as ended:
            ready = select.select([handle, ended], [], [], LIMIT)[0]
        assert handle in ready, f"nothing was written to the pipe: {process.communicate() if ready else 'it hangs'}"
        return os.read(handle, 65536).decode()

    yield path, read
    os.close(handle)


@pytest.fixture
def mount():
    """Return a function that mounts a small file system on a folder; NOT RUN where that needs other rights."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = []

    def make(folder: pathlib.Path, options: str = "size=1m", source: pathlib.Path | None = None, flags: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "--bind", str(source), str(folder)] if source else ["mount", "-t", "tmpfs", "-o", options]
        done = subprocess.run(command if source else [*command, "none", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here ({done.stderr.strip()}): it needs root")
        mounted.append(folder)
        if source:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        return folder

    def unmount(folder):
        mounted.remove(folder)
        assert libc.umount2(os.fsencode(folder), 2) == 0  # 2: MNT_DETACH

    make.end = unmount
    yield make
    for folder in reversed(list(mounted)):
        unmount(folder)
