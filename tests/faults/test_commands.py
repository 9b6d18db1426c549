"""What a command meets: a full disk, a script that the system kills, a path that is not plain.

A fault is a generator that makes it happen and yields; where it goes on, it takes the fault away and yields again. The
command is run after each: it shows one line and its exit status first, and is clean then.
"""

import json

import pytest
from tests.faults.conftest import LAB, notebook

CHECK, HINT = (("lab", verb, LAB) for verb in ("check", "hint"))
RUN = ("run", "01", "--out", "results")
PREFLIGHT = ("preflight", "--time-limit", "100", "train.py")
PASS, HINTED, RAN = ("^PASS lab 08", 0), ("^Hint 1 of 3", 0), ("1 of 1 PASS", 0)
STOPPED = ("ended by itself with status 0 before training", 3)  # a script that says SystemExit


def full_state(case, mount):
    """What was solved before is still there, byte for byte."""
    state = case.room.state
    before = state.read_bytes()
    folder = mount(state.parent, "size=64k")
    state.write_bytes(before)
    (folder / "filler").write_bytes(b"x" * 4096 * 13)
    try:
        with open(folder / "rest", "wb", buffering=0) as rest:
            while rest.write(b"x" * 4096):
                pass
    except OSError:
        pass
    yield
    assert state.read_bytes() == before
    (folder / "filler").unlink()
    yield
    assert json.loads(state.read_text())["labs"][LAB]["hints"] == 1


def full_preflight(case, mount):
    (case.room.folder / "train.py").write_text("raise SystemExit(0)\n")
    mount(case.temporary, "size=4k")
    yield
    mount.end(case.temporary)
    yield


def killed(case, mount):
    path = case.room.folder / "train.py"
    path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    yield
    path.write_text("raise SystemExit(0)\n")
    yield


def full_results(case, mount):
    mine = case.room.notebook.read_text()
    case.room.notebook.write_text(notebook("print('x' * 200_000)"))
    folder = mount(case.room.folder / "results", "size=64k")
    yield
    mount.again(folder, "size=20m")
    yield
    case.room.notebook.write_text(mine)


FULL = "^(ENVIRONMENT|ERROR) .*(No space left on device|no space is left)"


FAULTS = {
    "the disk is full at the state file": (full_state, HINT, "^ERROR .*No space left on device", 3, HINTED),
    "the disk is full at a run's results": (full_results, RUN, "No space left on device", 3, RAN),
    "the disk is full at preflight": (full_preflight, PREFLIGHT, FULL, 3, STOPPED),
    "preflight: the system kills the script": (killed, PREFLIGHT, "ended with signal SIGKILL", 3, STOPPED),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_command_meets_it(case, mount, name):
    fault, words, line, status, clean = FAULTS[name]
    course = fault(case, mount)
    next(course)
    kept = case.room.kept()
    case.run(*words).shows(line, status)
    assert case.room.kept() == kept, "what the learner wrote is gone"
    next(course)
    case.run(*words).shows(*clean)
    next(course, None)
    case.look()


@pytest.mark.parametrize("room", ["Übung 1 – naïve кот"], indirect=True)
def test_a_path_with_blanks_and_letters(case):
    """In a locale that is C."""
    case.run(*CHECK, env={"LC_ALL": "C"}).shows(*PASS)
