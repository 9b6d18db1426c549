"""What stands beside an era's kernel: the keeper that ends it, the quiet start, and the values it exchanges.

A kernel started from a notebook is a process of its own. When the notebook's kernel is restarted, shut down or killed,
it would go on, with its data loader workers and whatever else it started, holding memory and a GPU for days. No code
in the notebook's kernel can prevent that, for SIGKILL leaves it no time; and a thread in the era's kernel does not run
while a long call holds the interpreter. So a third, small process, the keeper, starts the era's kernel and watches:

- its standard input is a pipe that the notebook's kernel holds open: end of file means that process is gone, however
  it ended;
- the same pipe may be held open by a forked child of the notebook's kernel, so the parent's id is looked at too;
- on Linux orphans of the era's kernel become the keeper's children, so that it finds and ends every one.

The keeper ends as the era's kernel did, with the same exit status or signal. It is run as a script, by the course's
own Python; the functions below it are called inside the era. Standard library alone.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import pathlib
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

LOG = "FAILURELAB_KERNEL_LOG"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform == "linux"


def keep(parent: int, folder: str, command: list[str]) -> int:
    """Run an era's kernel, and end it and all its descendants when `parent` is gone; return its wait status.

    Args:
        parent: process id of the notebook's kernel, which started this process and holds the other end of its stdin.
        folder: the kernel's own temporary folder, deleted at the end, unless that is a crash.
        command: what starts the kernel.
    """
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    # An interrupt is sent to the whole process group, and not meant for the keeper.
    signal.signal(signal.SIGINT, lambda *_: None)
    awake, wake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    libc = ctypes.CDLL(None) if _LINUX else None
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
    while status is None and not told and os.getppid() == parent:
        ready, _, _ = select.select([0, awake], [], [], 0.5)
        if 0 in ready and not os.read(0, 1024):
            break
        if awake in ready:
            os.read(awake, 1024)
        status = _reap().get(kernel.pid)
    _end_descendants()
    if not status:
        shutil.rmtree(folder, ignore_errors=True)  # of a crash, the notebook's kernel reads the log first
    return status or 0


def _reap() -> dict[int, int]:
    """Collect the children that have ended, orphans of the kernel among them: process id to wait status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            ended[found[0]] = found[1]
    return ended


def _end_descendants() -> None:
    """Kill every child until none is left; the children of one that ended become this process's own (on Linux)."""
    if not _LINUX:
        os.killpg(os.getpgrp(), signal.SIGTERM)
        return
    deadline = time.monotonic() + 20
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
        _reap()


def _children() -> list[int]:
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # pid (command) state ppid: the command may hold spaces and brackets
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(folder.name))
    return found


def _end_as(status: int) -> None:
    """Exit with the kernel's status, or by the signal that ended it."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


# What follows runs inside the era's kernel.


def prepare() -> None:
    """Make a new kernel quiet, let a crash write its Python stack to the kernel's log, and let its end be quick."""
    from failurelab_course.experiments import quiet as noise

    noise.silence()
    if os.environ.get(LOG):
        # The kernel has taken stderr over, to relay it; after a crash nobody would.
        faulthandler.enable(open(os.environ[LOG], "a"), all_threads=False)  # noqa: SIM115 (open until the end)
    atexit.register(_leave)


def _leave() -> None:
    """End the process after all that was registered with atexit since the start: to take torch down takes 2 s more."""
    from IPython import get_ipython

    get_ipython().user_ns.clear()  # files left open are written
    gc.collect()
    os._exit(0)


def preload() -> None:
    """Import what takes long, so that a cell need not wait: torch, transformers, trl's GRPOTrainer, matplotlib."""
    import matplotlib.pyplot  # noqa: F401
    from trl import GRPOConfig, GRPOTrainer  # noqa: F401

    import failurelab_course.experiments.observe  # noqa: F401


class NotSendable(TypeError):
    """A value that JSON cannot carry between two kernels; the message says which and what to do."""


def pack(values: Mapping[str, Any]) -> str:
    """Return named values as JSON text.

    NaN and infinities travel as they are, for a failing run has such figures to report; a tuple becomes a list.

    Raises:
        NotSendable: a value, or something within it, is no number, string, boolean, None, list or dictionary of these.
    """
    for name, value in values.items():
        _check(name, value, ())
    return json.dumps(dict(values))


def _check(path: str, value: Any, within: tuple[int, ...]) -> None:
    if value is None or isinstance(value, str | int | float):
        return
    if id(value) in within:
        raise NotSendable(f"{path} contains itself, which JSON cannot carry.")
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _check(f"{path}[{index}]", part, (*within, id(value)))
    elif isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise NotSendable(
                    f"{path} is a dict with a key of type {type(key).__name__} ({key!r}), and JSON's keys are strings. "
                    f"Next: convert the keys with str(), or carry list({path}.items())."
                )
            _check(f"{path}[{key!r}]", part, (*within, id(value)))
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise NotSendable(f"{path} is a {kind}, which JSON cannot carry. Next: {_advice(path, value)}.")


def _advice(path: str, value: Any) -> str:
    if hasattr(value, "tolist"):
        return f"carry {path}.tolist()"
    if isinstance(value, set | frozenset | range) or type(value).__name__.startswith("dict_"):
        return f"carry list({path})"
    if isinstance(value, os.PathLike):
        return f"carry str({path})"
    return "carry the numbers, strings or lists that you need of it"


def unpack(text: str) -> dict[str, Any]:
    """Return the values that `pack` made a text of."""
    return json.loads(text)


def load(text: str) -> None:
    """Set variables of this kernel from the JSON text of `pack`."""
    from IPython import get_ipython

    get_ipython().push(unpack(text))


def dump(names: Iterable[str]) -> str:
    """Return variables of this kernel as JSON text, as `pack` does.

    Raises:
        NotSendable: a value that JSON cannot carry.
        NameError: there is no such variable.
    """
    from IPython import get_ipython

    variables = get_ipython().user_ns
    for name in names:
        if name not in variables:
            raise NameError(f"{name} does not exist there after the cell. Next: assign it in the cell")
    return pack({name: variables[name] for name in names})


if __name__ == "__main__":
    _end_as(keep(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
