"""Faults of a set-up: the real uv, an index of this machine with wheels of some bytes, and an era that has no torch."""

import hashlib
import http.server
import io
import os
import random
import shutil
import signal
import socket
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

    def start(env=None, code=None):
        command = [sys.executable, *(("-c", code) if code else ("-m", "failurelab_course.eras")), "create", "old"]
        return case.start(*command, env=variables | (env or {}))

    start.run = lambda **options: case.end(start(**options))
    return start


def era_of(room) -> eras.Era:
    top = room.folder
    return eras.Era("old", "old times", top / "eras" / "old.txt", top / ".eras" / "old")


def ready(room, done):
    """Hold that a set-up ended with a whole era, and with nothing beside it."""
    assert done.line("^era old: ready") and done.status == 0
    assert era_of(room).status == "ready"
    assert [path.name for path in (room.folder / ".eras").iterdir() if "partial" in path.name] == []


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


@pytest.fixture
def nobody():
    """An address on the loopback where nobody listens, and nobody can: the port is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def another(handler, name):
    handler.server.digest = lambda name: "0" * 64
    return False


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        pytest.param(None, "was not reached", marks=fault("no network at a set-up"), id="none"),
        pytest.param(refuse, "was not reached", marks=fault("a package index that never answers"), id="slow"),
        pytest.param(half, "came damaged, or is another file", marks=fault("a download is cut short"), id="half"),
        pytest.param(another, "came damaged, or is another file", marks=fault("a file of another digest"), id="digest"),
    ],
)
def test_an_index(case, room, setup, index, nobody, broken, line):
    """Uv holds a file to the digest that the index names; the locks name none, so a hostile index is believed."""
    digest, index.fault = index.digest, broken or index.fault
    done = setup.run(env=None if broken else {"UV_DEFAULT_INDEX": nobody})
    case.shows(done, f"^ERROR era old: .*{line}.*Next: ", 1)
    index.fault, index.digest = (lambda handler, name: False), digest
    ready(room, setup.run())


@fault("the disk is full at a set-up")
def test_a_full_disk(case, room, setup, mount):
    """A file system without inodes says the same as one without bytes; the room that is asked for first is there."""
    folder = mount(room.folder / ".eras", "size=3g,nr_inodes=26")
    case.shows(setup.run(), "^ERROR .*(no space is left on the disk|No space left on device)", 1)
    mount.again(folder, "nr_inodes=10000")
    ready(room, setup.run())
    case.look()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=fault("a set-up is killed while uv installs"), id="killed"),
        pytest.param(signal.SIGINT, marks=fault("Ctrl-C while uv installs"), id="ctrl-c"),
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
    running.kill() if number == signal.SIGKILL else os.killpg(running.pid, number)
    status = -9 if number == signal.SIGKILL else 130
    case.shows(case.end(running), "set-up interrupted: what is done already is kept", status)
    assert case.left() == []
    index.never.set()
    index.fault = lambda handler, name: False
    ready(room, setup.run())
    for path in case.temporary.iterdir():  # of uv, which was killed
        shutil.rmtree(path) if path.is_dir() else path.unlink()
