"""Faults of a set-up: the real uv, an index of this machine with wheels of some bytes, and an era that has no torch."""

import hashlib
import http.server
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import zipfile

import pytest
from tests.faults.conftest import ROOT

from failurelab_course import eras

fault = pytest.mark.fault
# An editable install needs a build backend: one that needs nothing, so that the index holds no setuptools.
BACKEND = """
import pathlib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = pathlib.Path("NAME").read_text()
    wheel = f"{name}-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder, wheel), "w") as made:
        info = f"{name}-0.1.0.dist-info/"
        made.writestr(f"{name}.pth", str(pathlib.Path.cwd()))
        made.writestr(info + "METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 0.1.0\\n")
        made.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\n")
        made.writestr(info + "RECORD", "")
    return wheel
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "{}"
version = "0.1.0"
"""


def wheel(name: str, version: str, kibibytes: int = 1) -> bytes:
    """Return a wheel with one module of so many KiB, which cannot be packed smaller."""
    content, info = io.BytesIO(), f"{name}-{version}.dist-info/"
    blob = random.Random(0).randbytes(kibibytes * 512).hex()
    with zipfile.ZipFile(content, "w") as made:
        made.writestr(f"{name}.py", f"BLOB = '{blob}'\n")
        made.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        made.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(info + "RECORD", f"{name}.py,,\n{info}METADATA,,\n{info}WHEEL,,\n{info}RECORD,,\n")
    return content.getvalue()


class Index(http.server.ThreadingHTTPServer):
    """A package index on the loopback; `fault` is called with each request, and may answer it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheels = {"torch": wheel("torch", "2.13.0"), "six": wheel("six", "1.16.0", 256)}
        self.fault = lambda handler, name: False
        self.digest = lambda name: hashlib.sha256(self.wheels[name]).hexdigest()
        self.never = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """Whoever asked has been ended."""


VERSIONS = {"torch": "2.13.0", "six": "1.16.0"}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        parts = self.path.strip("/").split("/")
        name = parts[-1].partition("-")[0]
        if self.server.fault(self, name):
            return
        if name not in VERSIONS:
            self.send_error(404)
            return
        file = f"{name}-{VERSIONS[name]}-py3-none-any.whl"
        if parts[0] == "simple":
            body = f'<a href="/files/{file}#sha256={self.server.digest(name)}">{file}</a>'.encode()
        else:
            body = self.server.wheels[name]
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if parts[0] == "simple" else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def index():
    made = Index()
    yield made
    made.never.set()
    made.shutdown()
    made.server_close()


@pytest.fixture
def setup(case, room, index, tmp_path):
    """Return a function that starts the set-up of the small era in the learner's clone."""
    for name in ("eras", "helpers", ".eras", ".venv", "pyproject.toml"):
        (room.folder / name).unlink()
    files = {"torch.txt": "torch==2.13.0\n", "today.in": "# title: t\n", "today.txt": "six==1.16.0\n"}
    files |= {"old.in": "# title: old times\n", "old.txt": "six==1.16.0\n"}
    for folder in ("eras", "helpers/failurelab", ".eras", ".venv/bin"):
        (room.folder / folder).mkdir(parents=True)
    for name, text in files.items():
        (room.folder / "eras" / name).write_text(text)
    for folder, name in ((room.folder / "helpers", "grpo_failurelab"), (room.folder, "grpo_failurelab_course")):
        (folder / "backend.py").write_text(BACKEND)
        (folder / "NAME").write_text(name)
        (folder / "pyproject.toml").write_text(PROJECT.format(name.replace("_", "-")))
    (room.folder / ".venv" / "bin" / "uv").symlink_to(ROOT / ".venv" / "bin" / "uv")
    (tmp_path / "no-links").mkdir()
    variables = {"PYTHONPATH": str(ROOT / "helpers"), "UV_DEFAULT_INDEX": f"{index.url}/simple", "UV_INDEX_URL": None}
    variables |= {"UV_CACHE_DIR": str(tmp_path / "uv-cache"), "UV_HTTP_TIMEOUT": "2", "UV_HTTP_RETRIES": "0"}
    variables |= {"UV_FIND_LINKS": str(tmp_path / "no-links"), "PIP_FIND_LINKS": None, "UV_NO_CONFIG": "1"}
    variables |= {"UV_LINK_MODE": "copy", "NO_PROXY": "127.0.0.1"}

    def start(*names, prefix=(), env=None, code=None, **options):
        command = [sys.executable, *(("-c", code) if code else ("-m", "failurelab_course.eras")), "create"]
        return case.start(*command, *(names or ["old"]), prefix=prefix, env=variables | (env or {}), **options)

    start.run = lambda *names, **options: case.end(start(*names, **options))
    return start


def era_of(room) -> eras.Era:
    top = room.folder
    return eras.Era("old", "old times", top / "eras" / "old.txt", top / ".eras" / "old")


def nothing_made(room):
    """Hold that there is an era or none: no half one, and nothing beside it."""
    assert era_of(room).status in ("missing", "ready")
    assert [path.name for path in (room.folder / ".eras").iterdir() if "partial" in path.name] == []


READY = "^era old: ready"


def answer(status):
    def fault(handler, name):
        handler.send_error(status)
        return True

    return fault


def refuse(handler, name):
    handler.server.never.wait()
    return True


def half(handler, name):
    if handler.path.startswith("/files") and name == "six":
        body = handler.server.wheels[name]
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2])
        handler.wfile.flush()
        handler.connection.shutdown(2)
        return True
    return False


def another(handler, name):
    if handler.path.startswith("/files") and name == "six":
        body = handler.server.wheels["six"][:-50] + b"x" * 50
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True
    return False


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        pytest.param(
            answer(500),
            "reached|500",
            marks=fault("the package index answers 500", "an HTTP server on the loopback"),
            id="500",
        ),
        pytest.param(
            refuse,
            "was not reached",
            marks=fault("a slow network", "the index takes the request and never answers; uv waits for 2 s"),
            id="slow",
        ),
        pytest.param(
            half,
            "came damaged, or is another file",
            marks=fault("a download is cut short", "the index ends the connection in the middle of a wheel"),
            id="half",
        ),
        pytest.param(
            another,
            "came damaged, or is another file",
            marks=fault("a wheel is damaged on its way", "the index sends a wheel with other bytes at its end"),
            id="damaged",
        ),
        pytest.param(
            None, "was not reached", marks=fault("no network", "nothing listens where the index is named"), id="none"
        ),
    ],
)
def test_an_index(case, room, setup, index, broken, line):
    if broken:
        index.fault = broken
        done = setup.run()
    else:
        done = setup.run(env={"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"})
    case.shows(done, f"^ERROR era old: .*({line})", 1)
    assert "Next: " in case.line
    nothing_made(room)
    index.fault = lambda handler, name: False
    case.clean(setup.run(), READY)


@fault("the index has another file under the lock's name", "the digest that the index names is not that of its wheel")
def test_a_wrong_digest(case, room, setup, index):
    """Uv holds a file to the digest that the index names; the locks name none, so a hostile index is believed."""
    index.digest = lambda name: "0" * 64
    done = setup.run()
    case.shows(done, "^ERROR era old: .*came damaged, or is another file than the package index names.*Next: ", 1)
    nothing_made(room)
    index.digest = lambda name: hashlib.sha256(index.wheels[name]).hexdigest()
    case.clean(setup.run(), READY)


@pytest.mark.parametrize(
    ("inodes", "name"),
    [
        pytest.param(
            3,
            "environment",
            marks=fault("the disk is full at the environment", ".eras is a tmpfs with 3 inodes"),
            id="environment",
        ),
        pytest.param(
            26,
            "packages",
            marks=fault("the disk is full at the packages", ".eras is a tmpfs with few inodes"),
            id="packages",
        ),
    ],
)
def test_a_full_disk(case, room, setup, mount, inodes, name):
    """A file system without inodes says the same as one without bytes; the room that is asked for first is there."""
    mount(room.folder / ".eras", f"size=3g,nr_inodes={inodes}")
    case.shows(setup.run(), "^ERROR .*(no space is left on the disk|No space left on device)", 1)
    nothing_made(room)
    subprocess.run(["mount", "-o", "remount,nr_inodes=10000", str(room.folder / ".eras")], check=True)
    case.clean(setup.run(), READY)
    nothing_made(room)
    case.look()
    mount.end(room.folder / ".eras")


@fault("too little room for an era", ".eras lies on a disk with 1 MiB: the clone is a tmpfs")
def test_too_little_room(case, room, setup, mount, tmp_path):
    kept = tmp_path / "kept"
    shutil.copytree(room.folder, kept, symlinks=True)
    mount(room.folder, "size=400m")
    shutil.copytree(kept, room.folder, symlinks=True, dirs_exist_ok=True)
    case.shows(setup.run(), "^ERROR .*GB of disk are free at", 1)
    nothing_made(room)
    subprocess.run(["mount", "-o", "remount,size=3g", str(room.folder)], check=True)
    case.clean(setup.run(), READY)
    case.look()
    mount.end(room.folder)


def spoil_marker(era):
    (era.folder / eras.MARKER).unlink()


def spoil_python(era):
    python = str((9, 9)).encode()
    text = era.lock.read_bytes() + (era.lock.parent / "torch.txt").read_bytes() + python
    (era.folder / eras.MARKER).write_text(json.dumps({"lock": hashlib.sha256(text).hexdigest()[:16], "zero3": False}))


def spoil_lock(era):
    era.lock.write_text("six==1.16.0 # changed\n")


def spoil_interpreter(era):
    era.python.unlink()


@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        pytest.param(spoil_marker, "broken", marks=fault("a half-made era", "its marker is removed"), id="half"),
        pytest.param(
            spoil_python, "stale", marks=fault("an era made by another Python", "its marker is of 9.9"), id="python"
        ),
        pytest.param(
            spoil_lock, "stale", marks=fault("the lock is changed underneath", "a line of it is edited"), id="lock"
        ),
        pytest.param(
            spoil_interpreter,
            "broken",
            marks=fault("an era whose interpreter is gone", "the link is removed"),
            id="interpreter",
        ),
    ],
)
def test_an_era_that_is_not_as_it_was_made(case, room, setup, spoil, status):
    assert setup.run().status == 0
    spoil(era_of(room))
    asked = (
        "from failurelab_course import eras\n"
        "try: eras.find('old')\n"
        "except eras.EraError as error: raise SystemExit(f'ERROR {error}')"
    )
    case.shows(setup.run(code=asked), f"^ERROR era old is {status} .*Next: failurelab eras create old", 1)
    done = setup.run()
    assert "made again" in done.out
    case.clean(done, READY)
    nothing_made(room)


@fault("two set-ups at once", "two commands on one clone, started together; the index holds the first until both run")
def test_two_set_ups_at_once(case, room, setup, index):
    asked, go = threading.Event(), threading.Event()

    def hold(handler, name):
        asked.set()
        go.wait(60)
        return False

    index.fault = hold
    first = setup()
    assert asked.wait(60)
    second = setup(env={"PYTHONUNBUFFERED": "1"})
    said = second.stdout.readline()
    go.set()
    one, two = case.end(first), case.end(second)
    assert (one.status, two.status) == (0, 0), one.text + two.text
    two.out = said + two.out
    case.shows(two, "another set-up is making it, waiting for that", 0)
    case.clean(setup.run(), READY)
    nothing_made(room)


# Counts the lines that the set-up's own code runs, and ends the process, or interrupts it, at one of them.
COUNTED = """
import os, signal, sys
from failurelab_course.eras import install
at, number, log, count = {at}, {number}, {log!r}, 0
def trace(frame, event, argument):
    global count
    if "failurelab_course" + os.sep + "eras" not in frame.f_code.co_filename: return None
    if event == "line":
        count += 1
        if count == at: os.kill(os.getpid(), number)
    return trace
sys.settrace(trace)
status = install.main(sys.argv[1:])
sys.settrace(None)
if log: open(log, "w").write(str(count))
sys.exit(status)
"""


@fault("a set-up is interrupted, at 20 points chosen by seed", "SIGKILL or SIGINT at a line of its own code")
def test_interrupted_at_random_points(case, room, setup, tmp_path):
    """Each is resumed by the same command, which ends with a whole era."""
    log = tmp_path / "lines"
    assert setup.run(code=COUNTED.format(at=0, number=0, log=str(log))).status == 0
    lines, statuses = int(log.read_text()), []
    for seed in range(20):
        shutil.rmtree(room.folder / ".eras" / "old")
        at, number = random.Random(seed).randrange(1, lines), (signal.SIGKILL, signal.SIGINT)[seed % 2]
        done = setup.run(code=COUNTED.format(at=at, number=int(number), log=""))
        statuses.append(done.status)
        if number == signal.SIGINT and done.status == 130:
            case.shows(done, "set-up interrupted: what is done already is kept; run the same command again")
        again = setup.run()
        assert again.status == 0, f"seed {seed}, line {at}: {again.text}"
        assert era_of(room).status == "ready"
        nothing_made(room)
    assert statuses.count(-signal.SIGKILL) == 10
    case.status = 130
    case.clean(setup.run(), READY)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            signal.SIGKILL,
            marks=fault(
                "a set-up is killed while uv installs", "SIGKILL to the set-up alone, at a request to the index"
            ),
            id="killed",
        ),
        pytest.param(
            signal.SIGINT,
            marks=fault("Ctrl-C while uv installs", "SIGINT to the set-up's group, at a request to the index"),
            id="ctrl-c",
        ),
    ],
)
def test_ended_while_uv_installs(case, room, setup, index, number):
    """Uv must not go on alone: it would write into the environment that the next set-up makes."""
    asked = threading.Event()

    def hold(handler, name):
        asked.set()
        handler.server.never.wait()
        return True

    index.fault = hold
    running = setup(env={"UV_HTTP_TIMEOUT": "120"})
    assert asked.wait(60)
    if number == signal.SIGKILL:
        running.kill()
        case.end(running)
        case.line, case.status = "nothing: the command itself is gone", -9
    else:
        os.killpg(running.pid, number)
        case.shows(case.end(running), "set-up interrupted: what is done already is kept", 130)
        nothing_made(room)
    assert case.left() == []
    index.never.set()
    index.fault = lambda handler, name: False
    case.clean(setup.run(), READY)
    nothing_made(room)
    for path in case.temporary.iterdir():  # of uv, which was killed
        shutil.rmtree(path) if path.is_dir() else path.unlink()
