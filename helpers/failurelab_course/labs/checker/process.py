"""What a check may use of the machine, and its end: time, memory, processes, and whatever it left behind.

Memory is watched as the resident memory of the check and of everything that it started, for a limit on address space
would stop torch, which reserves far more than it uses. A process that a check sent into the background is adopted by
the check server (it is the subreaper of its children) and is ended with the check.
"""

import contextlib
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

# As many as a DataLoader or two may want; a fork bomb is stopped before the machine is.
PROCESSES = 32


class Child:
    """One check that runs: its order, its process, and which limit it broke, if any."""

    def __init__(self, order: dict[str, Any], pid: int):
        self.order, self.pid, self.start = order, pid, time.monotonic()
        self.over = ""

    def watch(self) -> str:
        """Return which limit the check is over, in words, or an empty text; remember it."""
        if not self.over and time.monotonic() - self.start > self.order["time_limit"]:
            self.over = f"over its time limit of {self.order['time_limit']:g} s"
        if not self.over and sys.platform == "linux":
            family = descendants(self.pid)
            held = sum(map(_resident, family)) // 2**20
            if held > self.order["memory_limit"]:
                self.over = f"over its memory limit of {self.order['memory_limit']} MiB: it held {held}"
            elif len(family) > PROCESSES:
                self.over = f"over its limit of {PROCESSES} processes: it had started {len(family)}"
        return self.over

    def end(self) -> None:
        """Kill it and all that it started, and reap it."""
        kill([*descendants(self.pid), self.pid])
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        kill_group(self.pid)


def kill(pids: Iterable[int]) -> None:
    """End these processes, whichever of them are still there."""
    for pid in pids:
        _signal(os.kill, pid)


def kill_group(pid: int) -> None:
    """End the process group of a check."""
    _signal(os.killpg, pid)


def _signal(send: Callable[[int, int], None], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, signal.SIGKILL)


def adopt() -> None:
    """Make this process the one to which orphans of its checks fall, instead of the system's first."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def end_orphans(running: Iterable[Child]) -> None:
    """End and reap what fell to this process and belongs to no check that runs: a check may leave nothing behind."""
    keep = {child.pid for child in running}
    sessions = _sessions()
    for pid, (parent, session) in sessions.items():
        if parent == os.getpid() and pid not in keep and session not in keep:
            kill([*descendants(pid), pid])
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def descendants(pid: int) -> list[int]:
    """Return the process and everything below it that runs, by the system's table; itself where there is none."""
    children: dict[int, list[int]] = {}
    for each, (parent, _) in _sessions().items():
        children.setdefault(parent, []).append(each)
    found, rest = [], [pid]
    while rest:
        found.append(rest.pop())
        rest += children.get(found[-1], [])
    return found


def _sessions() -> dict[int, tuple[int, int]]:
    """Return parent and session of every process of this machine that can be seen."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # "pid (name) state ppid pgrp session ...": the name may hold blanks and brackets
            fields = path.read_text().rpartition(")")[2].split()
            found[int(path.parent.name)] = (int(fields[1]), int(fields[3]))
    return found


def _resident(pid: int) -> int:
    """Return the resident bytes of a process; what it shares with others, as after a fork, is divided among them."""
    with contextlib.suppress(OSError, ValueError):
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
