"""Faults of a script that preflight runs: it kills, forks, hangs, fills the disk, deletes its folder."""

import os
import signal

import pytest

fault = pytest.mark.fault
SCRIPTS = {
    "preflight: the script kills its parent": (
        "SIGKILL to os.getppid(), the command itself",
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1000)",
        "",
        -9,
    ),
    "preflight: the script kills itself": (
        "SIGKILL to itself, as memory's end comes",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "its process ended with signal SIGKILL .often too little memory.",
        3,
    ),
    "preflight: the script hangs": ("an endless loop", "while True: pass", "was ended after 15 seconds", 3),
    "preflight: the script forks endlessly": (
        "a loop of fork up to 300 processes, each waits",
        "import os, time\nfor _ in range(300):\n    if not os.fork(): time.sleep(1000)\ntime.sleep(1000)",
        "was ended after 15 seconds",
        3,
    ),
    "preflight: the script leaves a daemon behind": (
        "two forks with a session of their own, then the script ends",
        "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(1000)\n    os._exit(0)\n"
        "os.wait()",
        "trained nothing|no trainer|never|train",
        3,
    ),
    "preflight: the script deletes its temporary folder": (
        "shutil.rmtree of TMPDIR's parent, with the report's place",
        "import os, shutil\nshutil.rmtree(os.path.dirname(os.environ['TMPDIR']))\nos._exit(1)",
        "its process ended with status 1 while .* it deleted the folder",
        3,
    ),
    "preflight: the script prints 100 MB": (
        "a hundred prints of a million bytes",
        "for _ in range(100): print('x' * 10**6)",
        "trained nothing|no trainer|never|train",
        3,
    ),
}
CLEAN = "raise SystemExit(0)\n"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=fault(name, how), id=name) for name, (how, *_) in SCRIPTS.items()]
)
def test_a_script(case, tmp_path, name):
    _, code, line, status = SCRIPTS[name]
    script = tmp_path / "train.py"
    script.write_text(code)
    done = case.run("preflight", "--time-limit", "15" if "15" in line else "100", script)
    if line:
        case.shows(done, line, status)
    else:
        assert done.status == status
        case.line, case.status = "nothing: the command itself is gone", status
        for path in case.temporary.iterdir():  # nobody is there to remove it
            assert path.name.startswith("failurelab-preflight-")
            os.rename(path, tmp_path / path.name)
    assert case.left() == []
    script.write_text(CLEAN)
    case.clean(case.run("preflight", "--time-limit", "60", script), "SystemExit|ended", 3)


@pytest.mark.fault("preflight: the disk is full", "the temporary folder is a tmpfs with 4 KiB")
def test_no_room(case, tmp_path, mount):
    script = tmp_path / "train.py"
    script.write_text(CLEAN)
    mount(case.temporary, "size=4k")
    case.shows(case.run("preflight", script), "^ERROR .*(No space left on device|no space is left on the disk)", 3)
    mount.end(case.temporary)
    case.clean(case.run("preflight", "--time-limit", "60", script), "SystemExit|ended", 3)


@pytest.mark.fault("preflight: Ctrl-C", "SIGINT to the command's group, while the script hangs")
def test_ctrl_c(case, tmp_path, pipe):
    path, read = pipe
    script = tmp_path / "train.py"
    script.write_text(f"open({str(path)!r}, 'w').write('begun')\nwhile True: pass")
    running = case.start("preflight", script)
    assert read(running) == "begun"
    os.killpg(running.pid, signal.SIGINT)
    case.shows(case.end(running), "preflight was interrupted: the script's processes are ended, nothing is left", 130)
    script.write_text(CLEAN)
    case.clean(case.run("preflight", "--time-limit", "60", script), "SystemExit|ended", 3)
