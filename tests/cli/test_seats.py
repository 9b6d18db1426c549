"""A class on one server, what can be held without one: arithmetic, ports, a learner's copy, the hub's configuration."""

import asyncio
import importlib.util
import json
import os
import pathlib
import pwd
import socket
import subprocess
import sys
import types

import pytest

from failurelab_course import eras
from failurelab_course.experiments import deepspeed as engines
from failurelab_course.experiments import deepspeed_build as engine_build
from failurelab_course.ledger import records as evidence
from failurelab_course.teaching import seat_home, seats

ROOT = eras.root()
CONFIG = ROOT / "configs" / "hub" / "jupyterhub_config.py"
NEED = seats.Need(own=1000 * seats.MIB, shared=500 * seats.MIB)
GIB = 1024 * seats.MIB


@pytest.mark.parametrize("memory, fits", [(0, 0), (2, 0), (3, 1), (16, 14), (64, 64)])
def test_how_many_seats_fit(memory, fits):
    """What is shared counts once, the system keeps its part, and the last seat is a whole one."""
    assert seats.fit(memory * GIB, NEED) == fits
    assert NEED.of(fits) + seats.RESERVE <= memory * GIB or fits == 0
    assert NEED.of(fits + 1) + seats.RESERVE > memory * GIB


def test_a_class_that_does_not_fit_is_refused():
    assert seats.check(14, 16 * GIB, NEED) == 14
    with pytest.raises(
        seats.SeatError, match=r"^15 seats do not fit: .* 16384 MiB are available; 14 would fit\. Next: "
    ):
        seats.check(15, 16 * GIB, NEED)
    with pytest.raises(seats.SeatError, match="0 seats are asked for"):
        seats.check(0, 16 * GIB, NEED)
    with pytest.raises(ValueError, match="give the memory"):
        seats.fit(16 * GIB, seats.Need(0, 0))


def test_no_seat_more_than_memory():
    seats.check_one_more(NEED.own, NEED)
    with pytest.raises(seats.SeatError, match=r"out of memory: 999 MiB .* The seats that are open go on\. Next: "):
        seats.check_one_more(NEED.own - 1, NEED)


def test_a_container_s_limit_counts(tmp_path, monkeypatch):
    """In a container /proc/meminfo is the host's: 64 GiB there do not help a class that may have 2."""
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert min(seats._container(tmp_path)) == GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert min(seats._container(tmp_path)) == sys.maxsize
    assert 0 < seats.available() < sys.maxsize


def record(own: float, shared: float, source: str = seats.SOURCE, **figures) -> dict:
    versions = {"python": "3.11"}
    kept = {"schema": 1, "failure": "ground", "case": str(figures), "state": "measured", "era": "today", "tier": "cpu"}
    kept |= {"device": "CPU", "versions": versions, "source": source, "seed": None}
    return kept | {"figures": {"own_mib": own, "shared_mib": shared, "notebook": "01", "seats": 1} | figures}


def test_a_seat_s_need_comes_from_the_ledger(tmp_path):
    """Of each notebook the largest class counts, for a seat alone seems to own what it would share; then the worst."""
    path = tmp_path / "cpu.json"
    alone, together, other = record(1500, 10), record(1200, 300, seats=4), record(2000, 50, notebook="06")
    evidence.write_ledger(path, [alone, together, other, record(9000, 9000, source="benchmarks/other.py")])
    assert seats.measured("01", ledger=path) == seats.Need(1200 * seats.MIB, 300 * seats.MIB)
    assert seats.measured(ledger=path) == seats.Need(2000 * seats.MIB, 300 * seats.MIB)
    with pytest.raises(seats.SeatError, match=r"no class was measured with notebook 09.* Next: "):
        seats.measured("09", ledger=path)
    with pytest.raises(seats.SeatError, match="no ledger"):
        seats.measured(ledger=tmp_path / "none.json")


def test_the_command(tmp_path):
    """`failurelab seats`: how many fit, and exit status 1 with one line where fewer do than are wanted."""
    command = [sys.executable, "-m", "failurelab", "seats", "--memory", "16", "--per-seat", "1500"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        0,
        "10 seats fit in 16384 MiB: 1500 MiB a seat, 0 MiB shared, 1024 MiB for the system\n",
    )
    done = subprocess.run([*command, "11"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("ERROR 11 seats do not fit") and "Next: " in done.stderr


def test_ports():
    """A taken port is named with what it is for; seats get free ones, and are told where there are none."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(seats.SeatError, match=f"port {port}, for the hub, is taken by another program.* Next: "):
            seats.check_port(port, "the hub")
        with pytest.raises(seats.SeatError, match=f"out of ports: none from {port} to {port} is free"):
            seats.free_port(range(port, port + 1))
    assert seats.free_port(range(port, port + 1)) == port
    with pytest.raises(seats.SeatError, match="out of ports"):
        seats.free_port(range(port, port + 1), taken=[port])


def test_a_closed_folder_above_the_course(tmp_path):
    """The usual one: Python or the clone lies in somebody's home, and no learner can start a kernel."""
    inside = tmp_path / "home" / "course"
    inside.mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)
    with pytest.raises(seats.SeatError, match=r"home is closed to other users\. Next: "):
        seats.check_reach([inside])


@pytest.fixture
def shared(tmp_path):
    """A small course as the teacher has it: lab 01 is solved there, and a folder of state lies about."""
    course = tmp_path / "shared"
    for name, text in {
        "notebooks/01_first.ipynb": "{}",
        "notebooks/.ipynb_checkpoints/01_first-checkpoint.ipynb": "{}",
        "labs/01_lab/train.py": "solved",
        "labs/01_lab/start.py": "broken",
        "labs/01_lab/train.backup-1.py": "old",
        "helpers/failurelab/x.py": "x = 1",
        ".venv/bin/python": "",
        ".course/labs.json": "{}",
        "README.md": "read",
    }.items():
        (course / name).parent.mkdir(parents=True, exist_ok=True)
        (course / name).write_text(text)
    (tmp_path / "home").mkdir()
    return course


def test_a_learner_s_copy(shared, tmp_path):
    """Notebooks and fresh labs are copied, the rest is linked, and the teacher's own state stays at home."""
    own = seat_home.prepare(shared, tmp_path / "home")
    assert own == tmp_path / "home" / "failurelab"
    assert (own / "labs/01_lab/start.py").read_text() == "broken" and not (own / "labs/01_lab/train.py").exists()
    assert sorted(path.name for path in own.iterdir()) == [".venv", "README.md", "helpers", "labs", "notebooks"]
    assert (own / "helpers").is_symlink() and not (own / "notebooks").is_symlink()
    assert not (own / "labs/01_lab/train.backup-1.py").exists() and not list(own.rglob(".ipynb_checkpoints"))


def test_a_second_start_keeps_what_the_learner_did(shared, tmp_path):
    own = seat_home.prepare(shared, tmp_path / "home")
    (own / "labs/01_lab/train.py").write_text("mine")
    (own / "notebooks/01_first.ipynb").write_text("mine too")
    (shared / "notebooks/02_second.ipynb").write_text("new")
    (own / "helpers").unlink()
    (own / "helpers").symlink_to(tmp_path / "where it was last year")
    seat_home.prepare(shared, tmp_path / "home")
    assert (own / "labs/01_lab/train.py").read_text() == "mine"
    assert (own / "notebooks/01_first.ipynb").read_text() == "mine too"
    assert (own / "notebooks/02_second.ipynb").read_text() == "new"
    assert (own / "helpers").resolve() == shared / "helpers"


def test_a_broken_home(shared, tmp_path):
    """One line, for the learner's page and the hub's log; made by the command that the hub runs as the learner."""
    with pytest.raises(seats.SeatError, match=r"home folder .*nowhere is missing.* Next: "):
        seat_home.prepare(shared, tmp_path / "nowhere")
    (tmp_path / "home" / "failurelab").write_text("a file of that name")
    command = [sys.executable, "-m", "failurelab_course.teaching.seat_home", str(shared), str(tmp_path / "home")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "cannot be made: File exists. Next: " in done.stderr


def test_a_cell_out_of_memory_is_explained(monkeypatch, capsys):
    """Python says a bare MemoryError, torch and an era's kernel something longer; another error gets no such line."""
    monkeypatch.setenv("FAILURELAB_SEAT_LIMIT", str(4096 * seats.MIB))
    events = types.SimpleNamespace(register=lambda name, function: kept.append(function))
    kept = []
    seat_home.load_ipython_extension(types.SimpleNamespace(events=events))
    for error, told in (
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes."), True),
        (RuntimeError("not enough memory: you tried to allocate 68719476736 bytes."), True),
        (ValueError("MemoryError: in era trl-0.14"), True),
        (ValueError("no such thing"), False),
        (None, False),
    ):
        kept[0](types.SimpleNamespace(error_in_exec=error))
        said = capsys.readouterr().err
        assert ("a process of this seat may hold 4096 MiB" in said and "Next: " in said) == told, error


def test_an_era_that_cannot_be_written(tmp_path, monkeypatch):
    """Shared read-only: torch's lock and ninja's log of DeepSpeed's operation go into a copy at home, once."""
    shared = tmp_path / "era" / "torch_extensions"
    (shared / engine_build.OPERATION).mkdir(parents=True)
    (shared / engine_build.OPERATION / "built.so").write_text("whole")
    os.utime(shared / engine_build.OPERATION / "built.so", (1, 1))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(shared))
    assert engine_build.extensions() == shared
    monkeypatch.setattr(engine_build.os, "access", lambda path, mode: False)
    own = engine_build.extensions()
    assert own.is_relative_to(tmp_path / ".cache") and own == engine_build.extensions()
    built = own / engine_build.OPERATION / "built.so"
    assert built.read_text() == "whole" and built.stat().st_mtime == 1, "an older copy would be built again"
    assert engines._surroundings()["TORCH_EXTENSIONS_DIR"] == str(own)
    assert [path.name for path in own.parent.iterdir()] == [own.name]


class Traits(dict):
    """A configuration as JupyterHub hands it to its file: sections and options as attributes."""

    def __getattr__(self, name):
        return self.setdefault(name, Traits())

    def __setattr__(self, name, value):
        self[name] = value


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`load(**variables)`: the configuration that the hub gets, and the names of its file."""

    def load(**variables):
        for name in [name for name in os.environ if name.startswith("FAILURELAB_")]:
            monkeypatch.delenv(name)
        plain = {"FAILURELAB_HUB_STATE": str(tmp_path / "state"), "FAILURELAB_SEAT_MIB": "1", "FAILURELAB_SEATS": "3"}
        for name, value in (plain | variables).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(seats, "check_port", lambda *_: None)
        monkeypatch.setattr(seats, "check_reach", lambda *_: None)
        monkeypatch.setattr(sys, "path", list(sys.path))
        names = {"__file__": str(CONFIG), "get_config": Traits}
        exec(compile(CONFIG.read_text(), str(CONFIG), "exec"), names)
        return names["c"], names

    return load


def test_the_hub_s_configuration(load, tmp_path):
    """Loaded as JupyterHub does: seats, ports, limits, and nothing that other machines reach without HTTPS."""
    c, _ = load(FAILURELAB_LIMIT_MIB="2048", FAILURELAB_HUB_PORT="9000")
    assert c.JupyterHub.active_server_limit == 3
    assert c.JupyterHub.bind_url == "http://127.0.0.1:9000"
    assert c.JupyterHub.hub_bind_url == "http://127.0.0.1:9002"
    assert c.Spawner.cmd[:2] == ["prlimit", f"--data={2048 * seats.MIB}"]
    assert c.Spawner.environment["FAILURELAB_SEAT_LIMIT"] == str(2048 * seats.MIB)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    c, _ = load(FAILURELAB_CERT="/etc/class.pem", FAILURELAB_KEY="/etc/class.key")
    assert c.JupyterHub.bind_url == "https://:8000" and c.JupyterHub.ssl_cert == "/etc/class.pem"


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"FAILURELAB_SEATS": "100000", "FAILURELAB_SEAT_MIB": "4096"}, "ERROR 100000 seats do not fit"),
        ({"FAILURELAB_SEATS": "many"}, "ERROR FAILURELAB_SEATS is 'many'"),
        ({"FAILURELAB_SEAT_PORTS": "20000"}, "ERROR FAILURELAB_SEAT_PORTS is '20000'"),
        ({"FAILURELAB_SEAT_PORTS": "20000-19000"}, "ERROR FAILURELAB_SEAT_PORTS is '20000-19000'"),
        ({"FAILURELAB_CERT": "/etc/class.pem"}, "ERROR FAILURELAB_CERT and FAILURELAB_KEY"),
    ],
)
def test_a_configuration_that_cannot_be(load, variables, said):
    """One line and an exit status instead of a traceback."""
    with pytest.raises(SystemExit) as end:
        load(**variables)
    assert str(end.value).startswith(said) and "Next: " in str(end.value)


def test_what_a_learner_is_told(load, monkeypatch, tmp_path):
    """Before a seat is opened: the reason is a message that JupyterHub shows; one learner's port is not another's."""
    _, names = load(FAILURELAB_SEAT_PORTS="29000-29001")
    monkeypatch.setattr(names["seats"], "free_port", lambda ports, taken=(): next(p for p in ports if p not in taken))
    names["prepare"] = lambda name: None
    names["RUN"] = tmp_path  # neither learner is a user of this machine
    names["pwd"] = types.SimpleNamespace(getpwnam=lambda name: pwd.getpwuid(os.getuid()))
    first, second = (types.SimpleNamespace(user=types.SimpleNamespace(name=name), port=0) for name in ("ann", "bob"))
    asyncio.run(names["before"](first))
    asyncio.run(names["before"](second))
    assert (first.port, second.port) == (29000, 29001)
    names["after"](first)
    assert names["given_ports"] == {"bob": 29001}
    monkeypatch.setattr(names["seats"], "available", lambda: 0)
    with pytest.raises(seats.SeatError) as told:
        asyncio.run(names["before"](first))
    assert told.value.jupyterhub_message.startswith("the server is out of memory: 0 MiB are available")
    assert names["given_ports"] == {"bob": 29001}


def test_a_class_that_cannot_be_held_is_not_run(tmp_path, monkeypatch):
    """`make class` names what is missing, and the next step; a skip would be taken for a pass."""
    spec = importlib.util.spec_from_file_location("class_hub", ROOT / "tests" / "hub" / "hub.py")
    hub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hub)
    monkeypatch.setattr(hub, "HUB", tmp_path)
    monkeypatch.setattr(hub.os, "geteuid", lambda: 1000)
    assert hub.missing().endswith("Next: sudo make class")
    monkeypatch.setattr(hub.os, "geteuid", lambda: 0)
    assert hub.missing().startswith("JupyterHub is not installed")
    (tmp_path / "lock").touch()
    monkeypatch.setattr(hub.shutil, "which", lambda tool: None if tool == "prlimit" else tool)
    assert hub.missing() == "prlimit is not on the path. Next: install util-linux"
    monkeypatch.setattr(hub.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(hub.subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=1))
    assert "may not make a mount namespace. Next: " in hub.missing()


def test_the_hub_s_environment_is_pinned():
    """Every package with its checksum; the proxy as package.json asks for it."""
    folder = CONFIG.parent
    lines = (folder / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if line and line[0].isalnum()]
    assert pinned and all("==" in line and line.endswith("\\") for line in pinned)
    asked = {line for line in (folder / "requirements.in").read_text().split("\n") if line and line[0].isalpha()}
    assert asked <= {line.split("==")[0] for line in pinned}
    proxy = json.loads((folder / "package.json").read_text())["dependencies"]["configurable-http-proxy"]
    lock = json.loads((folder / "package-lock.json").read_text())["packages"]
    assert lock["node_modules/configurable-http-proxy"]["version"] == proxy
    assert all("integrity" in package for name, package in lock.items() if name)
    assert pathlib.Path(ROOT / ".gitignore").read_text().count(".hub/") == 1
