"""What a command meets: a full disk, a broken file, no network.

A fault is a generator that makes it happen and yields; where it goes on, it takes the fault away and yields again. The
command is run after each: it shows one line and its exit status first, and is clean then.
"""

import json

import pytest
from tests.faults.conftest import LAB, notebook

CHECK, HINT, RESET = (("lab", verb, LAB) for verb in ("check", "hint", "reset"))
RUN = ("run", "01", "--out", "results")
PREFLIGHT = ("preflight", "--time-limit", "100", "train.py")
PASS, HINTED, RAN = ("^PASS lab 08", 0), ("^Hint 1 of 3", 0), ("1 of 1 PASS", 0)
STOPPED = ("ended by itself with status 0 before training", 3)  # a script that says SystemExit


def cut(name):
    """Return a fault: a file of the clone is cut in the middle."""

    def fault(case, mount):
        path = case.room.folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        yield
        assert path.read_bytes() == whole[: len(whole) // 2], "the broken file is left as it is"
        path.write_bytes(whole)
        yield

    return fault


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


def full_reset(case, mount):
    """No half backup, and the learner's script stays where it is."""
    room = case.room
    files = {path.name: path.read_bytes() for path in room.lab.iterdir()}
    folder = mount(room.lab, "size=3m")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    mine = "# mine\n" + "#" * 2**20
    room.script.write_text(mine)
    (folder / "filler").write_bytes(b"x" * (2**20 + 2**19))
    yield
    assert room.script.read_text() == mine and not list(folder.glob("train.backup*"))
    (folder / "filler").unlink()
    yield
    assert (folder / "train.backup-1.py").read_text() == mine
    room.script.write_text(mine)


def full_check(case, mount):
    mount(case.temporary, "size=4k")
    yield
    mount.end(case.temporary)
    yield


def full_preflight(case, mount):
    (case.room.folder / "train.py").write_text("raise SystemExit(0)\n")
    yield from full_check(case, mount)


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


def read_only(case, mount):
    mine = case.room.script.read_bytes()
    case.room.script.unlink()
    mount(case.room.folder, "bind,ro", source=case.room.folder)
    yield
    mount.end(case.room.folder)
    case.room.script.write_bytes(mine)
    yield


def no_network(case, mount):
    case.prefix = ("unshare", "-n")
    if case.run("/bin/true").status:
        pytest.skip("a network namespace needs root")
    yield
    case.prefix = ()
    yield


FULL = "^(ENVIRONMENT|ERROR) .*(No space left on device|no space is left)"


FAULTS = {
    "a corrupt model": (cut("models/tiny-qwen2/model.safetensors"), CHECK, "^ENVIRONMENT .* cannot be loaded", 3, PASS),
    "a corrupt notebook": (cut("notebooks/01_mine.ipynb"), RUN, "^ERROR notebook .*Next: git checkout 01_mine", 1, RAN),
    "the disk is full at the state file": (full_state, HINT, "^ERROR .*No space left on device", 3, HINTED),
    "the disk is full at a reset": (full_reset, RESET, "^ERROR .*No space left", 3, ("kept in .*train.backup-1.py", 0)),
    "the disk is full at a check": (full_check, CHECK, FULL, 3, PASS),
    "the disk is full at a run's results": (full_results, RUN, "No space left on device", 3, RAN),
    "the disk is full at preflight": (full_preflight, PREFLIGHT, FULL, 3, STOPPED),
    "preflight: the system kills the script": (killed, PREFLIGHT, "ended with signal SIGKILL", 3, STOPPED),
    "a read-only checkout": (read_only, CHECK, "^ERROR .*Read-only file system", 3, PASS),
    "no network at a check": (no_network, CHECK, "^PASS lab 08", 0, PASS),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.fault(name), id=name) for name in FAULTS])
def test_a_command_meets_it(case, mount, name):
    fault, words, line, status, clean = FAULTS[name]
    course = fault(case, mount)
    next(course)
    kept = case.room.kept() if case.room.script.exists() else None
    case.shows(case.run(*words), line, status)
    assert kept is None or case.room.kept() == kept, "what the learner wrote is gone"
    next(course)
    again = case.run(*words)
    assert again.line(clean[0]) and again.status == clean[1], again.text
    next(course, None)
    case.kept = case.room.kept() if words == RESET else case.kept
    case.look()


@pytest.mark.fault("a path with blanks and letters beyond ASCII")
@pytest.mark.parametrize("room", ["Übung 1 – naïve кот"], indirect=True)
def test_a_path_with_blanks_and_letters(case):
    """In a locale that is C."""
    case.shows(case.run(*CHECK, env={"LC_ALL": "C"}), *PASS)
