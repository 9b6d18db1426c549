"""The process that ends an era's kernel when the notebook's kernel is gone.

A kernel started from a notebook is a process of its own. When the notebook's kernel is restarted, shut down or killed,
it would go on, with its data loader workers and whatever else it started, holding memory and a GPU for days. No code
in the notebook's kernel can prevent that, for SIGKILL leaves it no time; and a thread in the era's kernel does not run
while a long call holds the interpreter. So a third, small process, the keeper, starts the era's kernel and watches: it
looks whether its own parent is still the notebook's kernel. On Linux orphans of the era's kernel become the keeper's
children, so that it finds and ends every one.

The keeper ends as the era's kernel did, with the same exit status or signal. It is run as a script, by the course's
own Python.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import psutil

from failurelab_course import processes

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_INTERVAL = 0.05  # seconds between two looks at the kernel and the parent


def keep(parent: int, folder: str, command: list[str]) -> int:
    """Run an era's kernel, and end it and all its descendants when `parent` is gone; return its wait status.

    Args:
        parent: process id of the notebook's kernel, which started this process.
        folder: the kernel's own temporary folder, deleted at the end, unless that is a crash.
        command: what starts the kernel.
    """
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    # An interrupt is sent to the whole process group, and not meant for the keeper. A handler, for a child would
    # inherit a signal that is ignored.
    signal.signal(signal.SIGINT, lambda *_: None)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        kernel = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"JPY_PARENT_PID": str(os.getpid())},
            # Should the keeper itself be killed, the kernel goes with it.
            preexec_fn=(lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)) if libc else None,
        )
    except OSError as error:
        print(f"{command[0]} cannot be run: {error}", file=sys.stderr)
        return 127 << 8
    status = None
    while status is None and not terminated and os.getppid() == parent:
        time.sleep(_INTERVAL)
        status = _reap().get(kernel.pid)
    processes.end(lambda: psutil.Process().children(recursive=True))
    if not status:
        shutil.rmtree(folder, ignore_errors=True)  # of a crash, the notebook's kernel reads the log first
    return status or 0


def _reap() -> dict[int, int]:
    """Collect the children that have ended, orphans of the kernel among them: process id to wait status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            ended[child[0]] = child[1]
    return ended


def _end_as(status: int) -> None:
    """Exit with the kernel's status, or by the signal that ended it."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _end_as(keep(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
