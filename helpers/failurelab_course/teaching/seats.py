"""A class on one server: how many seats fit, what each is given, and what stands in its way, said before it does.

A seat is one learner at work: a Jupyter server, the kernel of a notebook, and the kernels of the eras that it uses.
What goes wrong in a class: the machine runs out of memory and the system ends whatever is largest, in the middle of a
run and without a word to anybody. So seats are counted first, with figures that a class of real seats wrote.
JupyterHub's configuration (configs/hub/jupyterhub_config.py) asks this module; only the standard library is needed.
"""

import dataclasses
import errno
import pathlib
import socket
import sys
from collections.abc import Iterable

from failurelab.errors import FailureLabError
from failurelab_course import eras
from failurelab_course.ledger import records as evidence

MIB = 2**20
SOURCE = "class"  # of the records that a class wrote
RESERVE = 1024 * MIB  # left to the system, JupyterHub and its proxy
_NO_ROOM = "Next: fewer seats, a larger server, or Kubernetes (docs/class_server.md)."


class SeatError(FailureLabError):
    """A seat, or a class, cannot be had; the message says what was found and the next step."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory of a class, in bytes: `shared` once, for the libraries that all seats map, and `own` for every seat."""

    own: int
    shared: int

    def of(self, seats: int) -> int:
        """Return the bytes that so many seats take at their peak."""
        return self.shared + seats * self.own


def measured(notebook: str = "", *, ledger: pathlib.Path | None = None) -> Need:
    """Return what a seat took in the classes that were measured (evidence/cpu.json).

    A seat alone maps the libraries for itself, and they seem to be its own: of each notebook the largest class counts.

    Args:
        notebook: its number, such as `01`; empty for the most demanding one.
        ledger: another ledger.

    Raises:
        SeatError: no class was measured.
    """
    try:
        records = evidence.read_ledger(ledger or eras.root() / "evidence" / "cpu.json")
    except evidence.EvidenceError as error:
        raise SeatError(str(error)) from error
    largest: dict[str, dict] = {}
    for run in (made["figures"] for made in records if made["source"] == SOURCE and "own_mib" in made["figures"]):
        number = run["notebook"]
        if notebook in ("", number) and run["seats"] >= largest.get(number, run)["seats"]:
            largest[number] = run
    if not largest:
        which = f" with notebook {notebook}" if notebook else ""
        raise SeatError(f"no class was measured{which}, so no seat's memory is known. Next: make class-evidence")
    return Need(*(max(int(run[name] * MIB) for run in largest.values()) for name in ("own_mib", "shared_mib")))


def available() -> int:
    """Return the bytes of memory that this machine can still give, the limit of its container regarded.

    Raises:
        SeatError: this system does not tell.
    """
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError) as error:
        raise SeatError("this system does not tell its free memory. Next: failurelab seats --memory GIB") from error
    return min(free, *_container())


def _container(top: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> list[int]:
    """Return what a container's limit leaves, in versions 2 and 1 of control groups; without one, a huge number."""
    found = [sys.maxsize]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            found.append(max(int((top / limit).read_text()) - int((top / used).read_text()), 0))
        except (OSError, ValueError):  # no such file, or the word max: no limit
            continue
    return found


def fit(memory: int, need: Need, *, reserve: int = RESERVE) -> int:
    """Return how many seats fit into `memory` bytes; 0 if not even one.

    Args:
        memory: what the class may use, in bytes.
        need: what a seat takes, and what all take together once.
        reserve: bytes that are left to the system.

    Raises:
        ValueError: a seat that needs nothing.
    """
    if need.own <= 0:
        raise ValueError(f"a seat of {need.own} bytes: give the memory that one seat takes")
    return max((memory - reserve - need.shared) // need.own, 0)


def check(wanted: int, memory: int, need: Need, *, reserve: int = RESERVE) -> int:
    """Return `wanted` if so many seats fit, else say how many do.

    Raises:
        SeatError: less than one seat is wanted, or the memory is too small.
    """
    if wanted < 1:
        raise SeatError(f"{wanted} seats are asked for: a class has at least one. Next: give the number of learners.")
    fits = fit(memory, need, reserve=reserve)
    if wanted > fits:
        raise SeatError(
            f"{wanted} seats do not fit: they take {(need.of(wanted) + reserve) // MIB} MiB ({told(need, reserve)}), "
            f"and {memory // MIB} MiB are available; {fits} would fit. {_NO_ROOM}"
        )
    return wanted


def told(need: Need, reserve: int = RESERVE) -> str:
    """Return in words what a class takes."""
    own, shared, kept = (size // MIB for size in (need.own, need.shared, reserve))
    return f"{own} MiB a seat, {shared} MiB shared, {kept} MiB for the system"


def check_one_more(memory: int, need: Need) -> None:
    """Find out whether one more seat can be opened now, beside those that run.

    Raises:
        SeatError: the machine is out of memory.
    """
    if memory < need.own:
        raise SeatError(
            f"the server is out of memory: {memory // MIB} MiB are available and a seat takes {need.own // MIB} MiB. "
            "The seats that are open go on. Next: close a seat that nobody uses (Hub Control Panel), then start yours "
            "again."
        )


def check_port(port: int, what: str, address: str = "127.0.0.1") -> None:
    """Find out whether a port can be listened on.

    Raises:
        SeatError: another program has it, or this user may not have it.
    """
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except OSError as error:
            why = (
                "is taken by another program"
                if error.errno == errno.EADDRINUSE
                else f"cannot be had ({error.strerror})"
            )
            raise SeatError(
                f"port {port}, for {what}, {why}: the class cannot be reached there. Next: end that program "
                f"(ss -ltnp 'sport = :{port}' names it), or set FAILURELAB_HUB_PORT to another port."
            ) from error


def free_port(ports: range, taken: Iterable[int] = ()) -> int:
    """Return a port for a seat's server: none of `taken`, and nobody listens there.

    Raises:
        SeatError: the server is out of ports.
    """
    taken = set(taken)
    for port in ports:
        if port not in taken:
            try:
                check_port(port, "a seat")
            except SeatError:
                continue
            return port
    raise SeatError(
        f"the server is out of ports: none from {ports.start} to {ports.stop - 1} is free for a seat. The seats that "
        "are open go on. Next: close a seat that nobody uses, or set FAILURELAB_SEAT_PORTS to a wider range."
    )


def check_reach(paths: Iterable[pathlib.Path]) -> None:
    """Find what every learner must be able to read, and cannot: a folder above it is closed to other users.

    Raises:
        SeatError: such a folder, by name.
    """
    for path in paths:
        for folder in [path.resolve(), *path.resolve().parents]:
            if not folder.stat().st_mode & 0o001:
                raise SeatError(
                    f"learners cannot reach {path}: {folder} is closed to other users. Next: put the clone in a place "
                    "that all may read, such as /srv, and make it there with the system's Python: make setup "
                    "PYTHON=/usr/bin/python3"
                )
