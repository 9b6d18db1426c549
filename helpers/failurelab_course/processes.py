"""Processes ended together with all that they started: the run of a notebook, the check of a lab.

Ending a process group is not enough: a kernel, an era's kernel below it, or a process that a notebook starts in a
session of its own is in another. So what is to be ended is looked for: among the descendants of a process
(`psutil.Process(pid).children(recursive=True)`), or by a mark in the environment, which every descendant inherits, also
one whose parents are gone. Each is ended by its process id. Needs psutil alone, which the lock of every era holds.
"""

import contextlib
import ctypes
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import psutil

# Every process of one notebook's run has this variable; its value begins with what the run is called.
MARK = "FAILURELAB_RUN"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Make this process the one to which what it started falls when its parent ends, instead of the system's first."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let Linux kill this process when its parent is gone, at once, also in a call that holds the interpreter."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """Return the processes that run and whose variable begins with this mark; never the caller itself."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            others = process.pid != os.getpid() and process.environ().get(variable, "").startswith(mark)
            if others and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def end(find: Callable[[], Iterable[psutil.Process]], patience: float = 0.0) -> None:
    """End the processes that `find` returns, of which those that end by themselves in `patience` seconds are left.

    It looks again until nothing is found, for a process may start another while it is looked for; it gives up on what
    the system itself cannot end, such as a process that waits for a disk that is gone.
    """
    if patience:
        psutil.wait_procs(list(find()), timeout=patience)
    for _ in range(10):
        left = list(find())
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)


@contextlib.contextmanager
def ended_after(mark: str) -> Iterator[None]:
    """End all that has this mark after the block, also where this process is killed in it: another one waits for it."""
    watch = [sys.executable, "-m", __name__, mark]
    with subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True):  # which closes the pipe, and waits
        yield


def peak_bytes(family: Iterable[psutil.Process]) -> int | None:
    """Return the most that one of these processes has ever held; None where the system does not say."""
    held = []
    for process in family:
        with contextlib.suppress(OSError):  # it has ended, or this is no Linux
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            held += [1024 * int(size) for size in re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)]
    return max(held, default=None)


if __name__ == "__main__":
    sys.stdin.read()  # until the one that waits is gone
    end(lambda: marked(sys.argv[1]))
