"""Faults of a lab's check: what a learner's script may do, and what may happen to the check around it."""

import json
import os
import shutil
import signal
import subprocess
import threading

import psutil
import pytest
from tests.faults.conftest import LAB

fault = pytest.mark.fault
SCRIPTS = {
    "a lab's script hangs": (
        "an endless loop, beside a child that sleeps",
        "import subprocess\nsubprocess.Popen(['sleep', '1000'])\nwhile True: pass",
        r"^FAIL lab 01: train.py: over its time limit of 10 s",
    ),
    "a lab's script kills its parent": (
        "SIGKILL to os.getppid(), the process that forks checks",
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1000)",
        r"^(ENVIRONMENT lab 01: .*the process that forks checks was ended|"
        r"FAIL lab 01: train.py: left by itself with status 255)",
    ),
    "a lab's script forks endlessly": (
        "a loop of fork, each child forks and waits",
        "import os, time\nwhile True:\n    if not os.fork(): time.sleep(1000)",
        r"^FAIL lab 01: train.py: over its limit of 32 processes",
    ),
    "a lab's script deletes its folder": (
        "shutil.rmtree of the folder that the script is in",
        "import os, pathlib, shutil\nshutil.rmtree(pathlib.Path(__file__).resolve().parents[1])\nos._exit(0)",
        r"^FAIL lab 01: train.py: deleted the folder that it ran in",
    ),
    "a lab's script prints 100 MB": (
        "a hundred prints of a million bytes",
        "for _ in range(100): print('x' * 10**6)",
        r"^FAIL lab 01: .*log_probs",
    ),
    "a lab's script holds all memory": (
        "a list that grows by 64 MiB at a time",
        "held = []\nwhile True: held.append(bytearray(b'x' * 2**26))",
        r"^FAIL lab 01: train.py: over its memory limit of 1500 MiB",
    ),
    "a lab's script leaves a daemon behind": (
        "two forks with a session of their own, then the script ends",
        "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(1000)\n    os._exit(0)\n"
        "os.wait()",
        r"^FAIL lab 01: .*log_probs",
    ),
    "a lab's script is killed by the system": (
        "SIGKILL to itself, as memory's end comes",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        r"^ENVIRONMENT lab 01: the system killed the run",
    ),
}


def spoil(room, code):
    """Put the code at the head of the learner's script; return what was there."""
    mine = room.script.read_text()
    room.script.write_text(f"{code}\n{mine if 'print' not in code and 'fork' not in code else ''}")
    path = room.lab / "lab.toml"
    path.write_text(path.read_text().replace("time_limit = 60", f"time_limit = {200 if 'held' in code else 10}"))
    return mine


def status_of(line):
    """Return the exit status that the line stands for; None where either may come first."""
    return None if line.startswith("^(") else 3 if line.startswith("^ENV") else 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=fault(name, how), id=name) for name, (how, *_) in SCRIPTS.items()]
)
def test_a_script(case, room, name):
    """The learner's script does the worst: it is named, ended with all that it started, and the repaired one passes."""
    _, code, line = SCRIPTS[name]
    mine = spoil(room, code)
    case.kept = room.kept()
    case.shows(case.run("lab", "check", "01"), line, status_of(line))
    assert room.kept() == case.kept
    room.script.write_text(mine)
    case.kept = room.kept()
    case.clean_check()


@fault(
    "a lab's script fills the disk", "the temporary folder is a tmpfs of 64 MiB, and the script writes until it ends"
)
def test_a_script_that_fills_the_disk(case, room, mount):
    mount(case.temporary, "size=64m")
    mine = spoil(room, "with open('big', 'wb') as file:\n    while True: file.write(b'x' * 2**20)")
    case.kept = room.kept()
    case.shows(
        case.run("lab", "check", "01"),
        "^ENVIRONMENT lab 01: the check could not be done: no space is left on the disk",
        3,
    )
    room.script.write_text(mine)
    case.kept = room.kept()
    case.clean_check()
    mount.end(case.temporary)


@fault("no room for a check's own files", "the temporary folder is a tmpfs with 4 KiB")
def test_no_room_for_a_check(case, mount):
    mount(case.temporary, "size=4k")
    case.shows(case.run("lab", "check", "01"), "^(ENVIRONMENT|ERROR) .*(No space left on device|no space is left)", 3)
    mount.end(case.temporary)
    case.clean_check()


@fault("the disk is full at the state file", ".course is a tmpfs with one free page, which is then filled")
def test_no_room_for_the_state_file(case, room, mount):
    """The check is lost to the count, and nothing else: what was solved before is still there, byte for byte."""
    before = {path.name: path.read_bytes() for path in (room.folder / ".course").iterdir()}
    folder = mount(room.folder / ".course", "size=64k")
    for name, content in before.items():
        (folder / name).write_bytes(content)
    (folder / "filler").write_bytes(b"x" * 4096 * 13)
    with open(folder / "rest", "wb", buffering=0) as rest:
        try:
            while rest.write(b"x" * 4096):
                pass
        except OSError:
            pass
    case.shows(case.run("lab", "hint", "01"), "^ERROR .*No space left on device", 3)
    assert room.state.read_bytes() == before["labs.json"]
    (folder / "filler").unlink()
    case.clean(case.run("lab", "hint", "01"), "Hint 1 of 3")
    after = json.loads(room.state.read_text())
    assert after["labs"][LAB]["hints"] == 1
    case.look()
    mount.end(folder)


@fault("the disk is full at a reset", "the lab's folder is a tmpfs without a free byte; the learner's script is 1 MiB")
def test_no_room_for_a_backup(case, room, mount):
    """No half backup, and the learner's script stays where it is."""
    files = {path.name: path.read_bytes() for path in room.lab.iterdir()}
    folder = mount(room.lab, "size=3m")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    mine = "# mine\n" + "#" * 2**20
    room.script.write_text(mine)
    (folder / "filler").write_bytes(b"x" * (2**20 + 2**19))
    case.kept = room.kept()
    case.shows(case.run("lab", "reset", "01"), "^ERROR .*No space left on device", 3)
    assert room.script.read_text() == mine and not list(folder.glob("train.backup*"))
    (folder / "filler").unlink()
    case.clean(case.run("lab", "reset", "01"), "Yours is kept in labs/01_trivial/train.backup-1.py")
    assert (folder / "train.backup-1.py").read_text() == mine
    case.may_change.add("train.py")
    case.look()
    mount.end(folder)


def processes_of(pid, name):
    return [one for one in psutil.Process(pid).children(recursive=True) if name in " ".join(one.cmdline())]


@pytest.mark.parametrize(
    "who",
    [
        pytest.param("server", marks=fault("the check server is killed", "SIGKILL while a script hangs in it")),
        pytest.param("command", marks=fault("`failurelab lab check` is killed", "SIGKILL while a script hangs")),
        pytest.param("interrupt", marks=fault("Ctrl-C during a check", "SIGINT to the command's group")),
    ],
)
def test_a_check_that_is_ended_from_outside(case, room, pipe, who):
    path, read = pipe
    mine = spoil(room, f"open({str(path)!r}, 'w').write('begun')\nwhile True: pass")
    text = room.lab / "lab.toml"
    text.write_text(text.read_text().replace("time_limit = 10", "time_limit = 200"))
    case.kept = room.kept()
    command = case.start("lab", "check", "01")
    assert read(command) == "begun"
    if who == "server":
        processes_of(command.pid, "checker.server")[0].kill()
        case.shows(case.end(command), "^ENVIRONMENT lab 01: the era's process ended with status -9", 3)
    elif who == "command":
        command.kill()
        case.end(command)
        case.line, case.status = "nothing: the command itself is gone", -9
    else:
        os.killpg(command.pid, signal.SIGINT)
        case.shows(case.end(command), "^interrupted: what was started is ended", 130)
    assert case.left() == []
    room.script.write_text(mine)
    case.kept = room.kept()
    # What is killed leaves its folder: nobody is there to remove it.
    for left in case.temporary.glob({"command": "failurelab-check-*", "server": "pymp-*"}.get(who, "nothing")):
        shutil.rmtree(left)
    case.clean_check()


@fault("two `lab check`s at once", "two commands on one clone, started together")
def test_two_checks_at_once(case, room):
    room.script.write_text(room.script.read_text().replace("+ 1).logits", "+ 1).logits.float() * 2"))
    case.kept = room.kept()
    commands = [case.start("lab", "check", "01") for _ in range(2)]
    done = []
    threads = [threading.Thread(target=lambda one=one: done.append(case.end(one))) for one in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in done:
        case.shows(one, "^FAIL lab 01: scores are wrong", 1)
    assert json.loads(room.state.read_text())["labs"][LAB]["checks"] == 2
    room.script.write_text(room.script.read_text().replace(".float() * 2", ""))
    case.kept = room.kept()
    case.clean_check()


@pytest.mark.parametrize(
    ("limit", "line", "status"),
    [
        pytest.param(
            "--nofile=14",
            "^(ENVIRONMENT|ERROR) .*Too many open files",
            3,
            marks=fault("a limit on open files", "prlimit --nofile=14"),
            id="files",
        ),
        pytest.param(
            "--data=400000000",
            "^(ENVIRONMENT|ERROR) ",
            3,
            marks=fault("a limit on memory", "prlimit --data=400000000"),
            id="memory",
        ),
    ],
)
def test_a_limit_of_the_system(case, limit, line, status):
    case.shows(case.run("lab", "check", "01", prefix=("prlimit", limit)), line, status)
    case.clean_check()


@fault("a limit on processes", "prlimit --nproc=3, for a user of the system who may write the clone")
def test_a_limit_on_processes(case):
    """Root is held to no such limit, so another user runs the command, with root's right to files."""
    rights = "+dac_override,+dac_read_search"
    user = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
    user += [f"--inh-caps={rights}", f"--ambient-caps={rights}"]
    if subprocess.run([*user, "true"], capture_output=True).returncode:
        pytest.skip("to become another user needs root")
    done = case.run("lab", "check", "01", prefix=(*user, "prlimit", "--nproc=3"))
    case.shows(done, "^(ENVIRONMENT|ERROR) .*Resource temporarily unavailable", 3)
    case.clean_check()


@fault("no /dev/shm", "a mount namespace in which /dev/shm is an empty, read-only tmpfs")
def test_no_shared_memory(case):
    shell = 'mount -t tmpfs -o ro none /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace needs root")
    done = case.run("lab", "check", "01", prefix=("unshare", "-m", "sh", "-c", shell, "sh"))
    case.shows(done, "^PASS lab 01", 0)
    case.clean_check()


@pytest.mark.parametrize(
    "home",
    [
        pytest.param(None, marks=fault("HOME is missing", "the variable is unset"), id="unset"),
        pytest.param("/nowhere", marks=fault("HOME is no folder", "it names one that is not there"), id="nowhere"),
    ],
)
def test_no_home(case, home):
    case.shows(case.run("lab", "check", "01", env={"HOME": home}), "^PASS lab 01", 0)
    case.clean_check()


@fault("a path with blanks and letters beyond ASCII", "the clone is in such a folder, in a locale that is C")
@pytest.mark.parametrize("room", ["Übung 1 – naïve кот"], indirect=True)
def test_a_path_with_blanks_and_letters(case):
    case.shows(case.run("lab", "check", "01", env={"LC_ALL": "C"}), "^PASS lab 01", 0)
    case.clean_check()


@fault("a read-only checkout", "the clone is bound to itself, read-only")
def test_a_read_only_checkout(case, room, mount):
    room.script.unlink()
    mount(room.folder, source=room.folder)
    done = case.run("lab", "check", "01")
    mount.end(room.folder)
    case.shows(done, "^ERROR .*Read-only file system", 3)
    room.script.write_bytes(case.kept["train.py"])
    case.clean_check()


@fault("the clock is set back", "a lab was begun, by the state file, in the year 2999")
def test_the_clock_set_back(case, room):
    state = json.loads(room.state.read_text())
    state["labs"][LAB] = state["labs"]["02_done"] | {"started": "2999-01-01T10:00:00+00:00", "solved": ""}
    room.state.write_text(json.dumps(state))
    case.shows(case.run("lab", "check", "01"), "^PASS lab 01", 0)
    done = case.run("lab", "report", room.state)
    case.clean(done, "1 learners")
    assert "-" not in [word for word in done.out.split() if word[1:].isdigit() and word.startswith("-")], done.out
    assert not [word for word in done.out.split() if word.startswith("-") and word[1:].isdigit()], done.out
