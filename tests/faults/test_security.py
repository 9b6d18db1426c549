"""What a seat can reach and what leaves it: secrets, other users' files, ports, the network. See docs/security.md."""

import io
import os
import pathlib
import re
import subprocess
import zipfile

import psutil
import pytest
from tests.faults.conftest import MARK, ROOT, notebook
from tests.faults.test_setup import READY, setup, wheel  # noqa: F401  a fixture
from tests.faults.test_setup import index as index

fault = pytest.mark.fault
SECRETS = {
    "HF_TOKEN": "hf_" + "Zq7" * 11,
    "WANDB_API_KEY": "4f" * 20,
    "JUPYTERHUB_API_TOKEN": "hub-token-of-this-seat",
}


def told(*folders):
    """Return the files below these folders that hold a secret."""
    return [
        str(path)
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in SECRETS.values())
    ]


@fault(
    "secrets in the environment",
    "a run, a check, doctor and preflight with HF_TOKEN, WANDB_API_KEY and the hub's token",
)
def test_secrets_stay_out(case, room, tmp_path):
    """Evidence, logs, executed copies, HTML, JSON and what is printed hold none of them; a failed cell neither."""
    cell = "from failurelab_course.experiments import observe\nobserve.record('ground', 'measured', {'n': 1})\n1 / 0"
    mine = room.notebook.read_text()
    room.notebook.write_text(notebook("first = 1", cell))
    case.kept = room.kept()
    script = tmp_path / "train.py"
    script.write_text("import os\nraise SystemExit('stopped')\n")
    out = room.folder / "results"
    runs = [
        case.run("run", "01", "--out", out, env=SECRETS),
        case.run("lab", "check", "01", "--json", env=SECRETS),
        case.run("doctor", "--json", env=SECRETS),
        case.run("preflight", "--json", out / "p.json", "--junit", out / "p.xml", script, env=SECRETS),
    ]
    case.shows(runs[0], "ZeroDivisionError", 1)
    assert (out / "01_mine.html").is_file() and list(out.rglob("*.jsonl")) and (out / "p.json").is_file()
    for secret in SECRETS.values():
        assert not [done.text for done in runs if secret in done.text]
    assert told(out, room.folder / ".course", room.folder / "labs", case.temporary) == []
    room.notebook.write_text(mine)
    case.kept = room.kept()
    case.clean(case.run("run", "01", "--out", out, env=SECRETS), "1 of 1 PASS")


def open_to_others(case):
    """Return the addresses that processes of this fault listen on and that other machines can reach."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == case.mark:
                found += [one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        except (psutil.Error, OSError):
            pass
    return [address for address in found if address.ip not in ("127.0.0.1", "::1")], found


@fault("a port for other machines", "listening sockets of a run with an era's kernel are listed")
def test_nothing_listens_for_other_machines(case, room, pipe):
    path, read = pipe
    mine = room.notebook.read_text()
    cell = (
        "from failurelab_course.notebook import kernel\nera = kernel.EraKernel('today')\n"
        f"era.run('1')\nopen({str(path)!r}, 'w').write('begun')\nimport time\n"
        "while True: time.sleep(1)"
    )
    room.notebook.write_text(notebook(cell))
    case.kept = room.kept()
    running = case.start("run", "01", "--out", "results", "--time-limit", "100")
    assert read(running) == "begun"
    foreign, all_of_them = open_to_others(case)
    running.terminate()
    running.communicate()
    assert case.left() == [] and foreign == [] and all_of_them, "a kernel listens on the loopback"
    room.notebook.write_text(mine)
    case.kept = room.kept()
    case.line, case.status = "127.0.0.1 alone", None
    case.clean(case.run("run", "01", "--out", "results"), "1 of 1 PASS")


@fault("no network at a check", "a network namespace with nothing in it")
def test_no_network(case):
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("a network namespace needs root")
    case.shows(case.run("lab", "check", "01", prefix=("unshare", "-n")), "^PASS lab 01", 0)
    case.clean_check()


@fault("another seat's files and the hub's", "a process of the user nobody reads them, as the page sets them up")
def test_other_seats(case, room, tmp_path):
    """Homes are made with mode 0700, and the hub's state too: the system refuses, and the course adds nothing."""
    if os.getuid():
        pytest.skip("another user's process needs root")
    page = (ROOT / "docs" / "class_server.md").read_text()
    assert "-K HOME_MODE=0700" in page and "chmod 600 ~/class-passwords" in page
    assert "STATE.mkdir(mode=0o700" in (ROOT / "configs" / "hub" / "jupyterhub_config.py").read_text()
    public = pathlib.Path(case.temporary)
    public.chmod(0o755)
    seat = public / "ann"
    seat.mkdir(mode=0o700)
    (seat / "train.py").write_text("mine")
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "cat", str(seat / "train.py")]
    done = case.run("/usr/bin/env", *command, env={"LC_ALL": "C"})
    case.shows(done, "Permission denied", 1)
    assert subprocess.run(command[4:], capture_output=True, text=True).stdout == "mine"
    subprocess.run(["rm", "-r", str(seat)], check=True)
    case.clean_check()


@fault("a wheel with a path outside", "the index sends a wheel with ../../../outside.py in it")
def test_a_wheel_with_a_path_outside(case, room, setup, index):  # noqa: F811
    """Uv writes nothing outside of the environment."""
    whole = index.wheels["six"]
    content = io.BytesIO(whole)
    with zipfile.ZipFile(content, "a") as made:
        made.writestr("../../../../../../outside.py", "print('outside')")
    index.wheels["six"] = content.getvalue()
    case.shows(setup.run(), "^(ERROR era old: .*six|era old: ready)")
    assert not list(room.folder.parent.rglob("outside.py")) or case.status == 0
    assert not [path for path in room.folder.parent.rglob("outside.py") if ".eras" not in str(path)]
    index.wheels["six"] = wheel("six", "1.16.0", 256)
    subprocess.run(["rm", "-rf", str(room.folder.parent / "uv-cache")], check=True)
    case.clean(setup.run(), READY)


def test_the_page_names_what_the_locks_pin():
    """The advisories are of versions that are in the locks, and every historic stack is in the table."""
    page = (ROOT / "docs" / "security.md").read_text()
    pinned = {
        match[1]
        for lock in (ROOT / "eras").glob("trl-*.txt")
        for match in re.finditer(r"^transformers==(\S+)", lock.read_text(), re.MULTILINE)
    }
    assert pinned and all(version in page for version in pinned)
