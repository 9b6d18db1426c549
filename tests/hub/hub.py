"""A real JupyterHub for a test, with learners who are users of a room (see room.py), and what their seats take."""

import contextlib
import crypt
import grp
import json
import os
import pathlib
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "hub" / "jupyterhub_config.py"
HUB = ROOT / ".hub"
MIB = 2**20
FIRST_ID = 64100
PATIENCE = 120


def missing() -> str:
    """Return why a class cannot be held here, or an empty text."""
    if os.geteuid() != 0:
        return "a class has users of its own, which only root can be. Next: sudo make class"
    if not (HUB / "lock").exists():
        return "JupyterHub is not installed (.hub). Next: make class, which installs it"
    for tool in ("unshare", "mount", "prlimit", "choom", "setpriv"):
        if shutil.which(tool) is None:
            return f"{tool} is not on the path. Next: install util-linux"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "this container may not make a mount namespace. Next: run it on a machine, or with --cap-add SYS_ADMIN"
    return ""


def free_ports() -> int:
    """Return a port such that it and the next two are free."""
    while True:
        with contextlib.ExitStack() as held:
            try:
                first = held.enter_context(socket.socket())
                first.bind(("127.0.0.1", 0))
                port = first.getsockname()[1]
                for more in (1, 2):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port + more))
                return port
            except (OSError, OverflowError):
                continue


class Hub:
    """JupyterHub as `configs/hub/jupyterhub_config.py` has it, with `seats` learners called seat1, seat2 ...

    Attributes:
        room: a folder of its own, with home folders, the user list and the hub's state.
        url: where the class is reached.
        users: name to password.
        ids: name to user id.
    """

    def __init__(self, room: pathlib.Path, seats: int, **settings: str):
        taken = {each.pw_uid for each in pwd.getpwall()} | {each.gr_gid for each in grp.getgrall()}
        free = (number for number in range(FIRST_ID, 65000) if number not in taken)
        self.room, self.users, self.ids = room, {}, {}
        room.chmod(0o755)
        (room / "etc").mkdir()
        lines: dict[str, list[str]] = {"passwd": [], "shadow": [], "group": []}
        for number in range(1, seats + 1):
            name, password, own = f"seat{number}", secrets.token_hex(8), next(free)
            home = room / "home" / name
            home.mkdir(parents=True)
            os.chown(home, own, own)
            home.chmod(0o700)
            self.users[name], self.ids[name] = password, own
            lines["passwd"].append(f"{name}:x:{own}:{own}:a seat:{home}:/bin/bash")
            lines["shadow"].append(f"{name}:{crypt.crypt(password, crypt.METHOD_SHA512)}:19000:0:99999:7:::")
            lines["group"].append(f"{name}:x:{own}:")
        lines["group"].append(f"class:x:{next(free)}:{','.join(self.users)}")
        for name, more in lines.items():
            there = room / "etc" / name
            shutil.copyfile(pathlib.Path("/etc") / name, there)
            there.chmod(0o600 if name == "shadow" else 0o644)
            with there.open("a") as file:
                file.write("\n".join([*more, ""]))
        self.port = int(settings.pop("FAILURELAB_HUB_PORT", 0)) or free_ports()
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = {
            "FAILURELAB_HUB_PORT": str(self.port),
            "FAILURELAB_HUB_STATE": str(room / "state"),
            "FAILURELAB_HUB_RUN": str(room / "run"),
            "FAILURELAB_SEATS": str(seats),
            "FAILURELAB_SEAT_MIB": "1024",
        } | settings
        self._process: subprocess.Popen | None = None

    @property
    def log(self) -> str:
        """What the hub, its proxy and the seats' servers said."""
        return (self.room / "hub.log").read_text(errors="replace")

    def run(self) -> int:
        """Start the hub where it is expected to end at once; return its exit status."""
        self._launch()
        return self._process.wait(PATIENCE)

    def __enter__(self) -> "Hub":
        self._launch()
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/hub/health", timeout=5):
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(f"JupyterHub did not start:\n{self.log[-2000:]}")
            time.sleep(0.1)

    def __exit__(self, *_) -> None:
        self._process.send_signal(signal.SIGTERM)  # ends every seat, then the proxy
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        self.left = self.wait_until_gone()
        for process in [*self.left, self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()

    def wait_until_gone(self, name: str | None = None) -> list[int]:
        """Return the processes of a seat, or of all, that are still there after half a minute."""
        deadline = time.monotonic() + 30
        while (left := self.processes(name)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _launch(self) -> None:
        plain = {key: value for key, value in os.environ.items() if not key.startswith("FAILURELAB_")}
        # Should this test be killed, so is the hub.
        command = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "--propagation", "private"]
        command += [sys.executable, str(ROOT / "tests" / "hub" / "room.py")]
        command += [str(self.room), sys.base_prefix, str(ROOT)]
        command += [str(HUB / "bin" / "python"), "-m", "jupyterhub", "-f", str(CONFIG)]
        with open(self.room / "hub.log", "wb") as log:
            self._process = subprocess.Popen(
                command, env=plain | self._settings, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def processes(self, name: str | None = None) -> list[int]:
        """Return the processes of one seat, or of all: those of its user."""
        wanted = {self.ids[name]} if name else set(self.ids.values())
        found = []
        for folder in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and folder.stat().st_uid in wanted:
                    found.append(int(folder.name))
        return found


class Meter:
    """What seats take while a block runs: sampled twice a second, for every process of each.

    Attributes:
        peak: name to the largest proportional memory of the seat's processes together, bytes (a page that n processes
            map counts as a n-th in each).
        own: name to the largest memory that nobody else maps, bytes.
        together: the largest proportional memory of all seats at one time, bytes.
        data: the largest data segment of one process, bytes: what the limit of a process bounds.
        cpu: name to the processor seconds that the seat took.
    """

    def __init__(self, hub: Hub, names: list[str]):
        self._hub, self._names = hub, names
        self.peak, self.own = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        self.together = self.data = 0
        self._seconds: dict[tuple[str, int, int], float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Meter":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    @property
    def cpu(self) -> dict[str, float]:
        """Processor seconds of each seat, of its living processes and of those that ended."""
        return {
            name: sum(seconds for (seat, *_), seconds in self._seconds.items() if seat == name) for name in self._names
        }

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.sample()

    def sample(self) -> None:
        """Look once at every process of every seat."""
        together = 0
        for name in self._names:
            whole = own = 0
            for process in self._hub.processes(name):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    found = self._read(name, process)
                    whole, own = whole + found["Pss"], own + found["Private_Clean"] + found["Private_Dirty"]
            self.peak[name], self.own[name] = max(self.peak[name], whole), max(self.own[name], own)
            together += whole
        self.together = max(self.together, together)

    def _read(self, name: str, process: int) -> dict[str, int]:
        """Return a process's memory in bytes by kind; note its data segment and its processor seconds."""
        folder = pathlib.Path("/proc") / str(process)
        pairs = (line.split() for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
        kinds = {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs}
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        self.data = max(self.data, int(status["VmData"].split()[0]) * 1024)
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        key = (name, process, int(fields[19]))  # its start: a process id is used again
        self._seconds[key] = (int(fields[11]) + int(fields[12])) / ticks
        return kinds


def expected(path: pathlib.Path) -> dict[str, str]:
    """Return what the notebook's compared cells put out, by cell id, from the outputs that it stores."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {each["id"]: said(each["outputs"]) for each in cells if compared(each)}


def said(outputs: list[dict]) -> str:
    """Return what outputs say in plain text; an answer without what the learner had predicted before it."""
    from seat import text_of

    return re.sub(r"^(Answer:|No prediction was made\. It is) ", "", text_of(outputs))


def compared(cell: dict) -> bool:
    """Whether a cell's output is the same on every run: a verdict, or a count."""
    return cell["cell_type"] == "code" and "NBVAL_CHECK_OUTPUT" in "".join(cell["source"])
