"""Checks of many scripts in one era: each is a process of its own, watched, and ended with all that it started.

    python -m failurelab_course.labs.checker.server PIPE JOBS DEVICE

Orders and answers are JSON, sent over the connection that has the descriptor PIPE. The first answer says which of the
labs' needs do not import, `{"broken": {...}}`; then each order is a check (`client.Server.check`), and its answer holds
what `measure.run` measured, or how the check ended. When the connection is closed, this process ends its checks and
itself.

Each check is a fork of this process. For the CPU it has imported the libraries once, before the first check. That is
safe because it computes nothing: it has one thread, no parallel region of torch ever ran, and it sees no GPU. For a GPU
it imports none of them, and each check pays for its imports: CUDA cannot be used in the fork of a process that has so
much as counted GPUs, and libraries count them when they are imported.

Memory is watched as the resident memory of a check and of everything that it started: a limit on address space would
stop torch, which reserves far more than it uses.
"""

import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import pkgutil
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from failurelab_course import processes, state_file
from failurelab_course.experiments import imports

NEEDS = "FAILURELAB_NEEDS"  # the variable that names what the labs import, with blanks between
LOOK = 0.25  # seconds between two looks at a check's time, memory and processes; an end is known at once
# As many as a DataLoader or two may want; a script that starts ever more is stopped before the machine is.
PROCESSES = 32
BROKE = 70  # a check's exit status when the check itself could not be done


class RunningCheck:
    """One check that runs: its order, its process, what it has sent, and which limit it broke, if any."""

    def __init__(self, order: dict[str, Any], of_server: Connection):
        self.order, self.over, self.measured = order, "", None
        self.start, self.folder = time.monotonic(), pathlib.Path(order["folder"])
        for part in ("work", "home", "tmp"):
            (self.folder / part).mkdir(parents=True)
        shutil.copyfile(order["script"], self.folder / "work" / "train.py")
        shutil.copytree(order["model"], self.folder / "model")
        context = multiprocessing.get_context("fork")
        self.pipe, there = context.Pipe(duplex=False)
        self.process = context.Process(target=run_check, args=(order, there, of_server))
        with there:
            self.process.start()

    def has_ended(self) -> bool:
        """Return whether it ended by itself, or is over a limit and must be ended."""
        ended = self.process.exitcode is not None
        with contextlib.suppress(EOFError, OSError):  # it has closed its end without an answer
            if self.measured is None and self.pipe.poll():
                self.measured = json.loads(self.pipe.recv_bytes())
        self.over = "" if ended or self.measured else self._broken_limit()
        return ended or bool(self.over)

    def _broken_limit(self) -> str:
        """Return which limit it is over, in words, or an empty text."""
        if time.monotonic() - self.start > self.order["time_limit"]:
            return f"over its time limit of {self.order['time_limit']:g} s"
        family, limit = descendants(self.process.pid), self.order["memory_limit"] * 2**20
        # The first counts what processes share for each of them, and is quick.
        if memory_of(family, resident) > limit and (held := memory_of(family, own_share)) > limit:
            return f"over its memory limit of {self.order['memory_limit']} MiB: it held {held // 2**20}"
        if len(family) > PROCESSES:
            return f"over its limit of {PROCESSES} processes: it had started {len(family)}"
        return ""

    def end(self, keep: Collection[int]) -> None:
        """End it and all that it started, and wait for its end.

        What it started falls to this process when the check itself has ended, in whatever session it is: so each child
        of this process is ended but those to `keep`.
        """

        def left() -> list[psutil.Process]:
            fallen = (one.pid for one in psutil.Process().children() if one.pid not in keep)
            return [one for pid in (self.process.pid, *fallen) for one in descendants(pid)]

        processes.end(left)
        self.process.join()
        self.pipe.close()

    def answer(self) -> dict[str, Any]:
        """Return what came of it, and remove its folder; it must have been ended."""
        code, log = self.process.exitcode, self.folder / "output.txt"
        output = log.read_text(errors="replace") if log.is_file() else ""
        answer = {"id": self.order["id"], "seconds": time.monotonic() - self.start, "output": output[-4000:]}
        if self.over:
            answer["ended"] = self.over
        elif self.measured:
            answer["measured"] = self.measured
        elif code == BROKE:
            said = output.strip().splitlines() or ["nothing was said"]
            answer["environment"] = (
                f"the check could not be done: {state_file.full_disk(self.folder) or said[-1][:300]}"
            )
        elif code == -signal.SIGKILL:
            answer["environment"] = "the system killed the run (signal 9), as it does when memory runs out"
        else:
            how = f"ended by signal {-code}" if code < 0 else f"left by itself with status {code}"
            answer["ended"] = f"{how} before it was measured"
        shutil.rmtree(self.folder, ignore_errors=True)
        return answer


def run_check(order: dict[str, Any], pipe: Connection, of_server: Connection) -> None:
    """Do one check, send what was measured, and end with nothing of the script's own run at its end."""
    status = BROKE
    try:
        of_server.close()  # or who gave the order would not be told that the server has ended
        _enter(pathlib.Path(order["folder"]), order["visible"])
        pipe.send_bytes(json.dumps(_measure(order)).encode())
        status = 0
    except Exception:  # not the script's: that one's errors are what is measured
        traceback.print_exc()
    finally:
        os._exit(status)


def _enter(folder: pathlib.Path, gpu: str) -> None:
    """Make this process a run of its own: session, descriptors, folders, GPU; it ends when the server ends."""
    os.setsid()
    processes.end_with_parent()
    processes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    own = {"HOME": folder / "home", "TMPDIR": folder / "tmp", "HF_HOME": folder / "home", "HF_HUB_OFFLINE": "1"}
    own["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ |= {name: str(value) for name, value in own.items()}
    os.chdir(folder / "work")


def _measure(order: dict[str, Any]) -> dict[str, Any]:
    from failurelab_course.labs.checker import measure

    folder = pathlib.Path(order["folder"])
    measured = measure.run(
        folder / "work" / "train.py",
        folder / "model",
        folder / "output",
        device=order["device"],
        accuracy_before=order["accuracy_before"],
        **order["asked"],
    )
    return dataclasses.asdict(measured)


def descendants(pid: int) -> list[psutil.Process]:
    """Return a process and everything below it that runs; nothing where it has ended."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def resident(process: psutil.Process) -> int:
    """Return the resident bytes of a process, with all that it shares with others."""
    return process.memory_info().rss


def own_share(process: psutil.Process) -> int:
    """Return the resident bytes of a process; what it shares with others, as after a fork, is divided among them."""
    memory = process.memory_full_info()
    return getattr(memory, "pss", memory.uss)  # uss: where the system does not divide


def memory_of(family: Iterable[psutil.Process], ask: Callable[[psutil.Process], int]) -> int:
    """Return the bytes that processes hold together; of those that have ended meanwhile, none."""
    held = 0
    for one in family:
        with contextlib.suppress(psutil.Error):
            held += ask(one)
    return held


def import_needs() -> dict[str, str]:
    """Import what the labs need; return which `module.Name` or `module` fails, with the reason.

    Raises:
        RuntimeError: an import has started a thread, so that a forked check could hang.
    """
    broken = {}
    # A trainer collects when it begins to train: each check would look through all that was imported, and copy its
    # pages, for half a second.
    with imports.uncollected():
        from failurelab_course.labs.checker import measure  # noqa: F401  torch and transformers

        for need in os.environ[NEEDS].split():
            try:
                pkgutil.resolve_name(need)
            except Exception as error:  # an import of a stack that does not fit fails in every way
                first = next(iter(str(error).strip().splitlines()), "")
                broken[need] = f"{type(error).__name__}: {first}"
    if threading.active_count() != 1:
        raise RuntimeError("a forked check could hang: the check server has more than one thread")
    return broken


def serve(pipe: Connection, jobs: int, device: str) -> None:
    """Do the orders that come over the connection, so many at once, until it is closed."""
    processes.adopt_orphans()
    pipe.send_bytes(json.dumps({"broken": import_needs() if device == "cpu" else {}}).encode())
    waiting: collections.deque[dict[str, Any]] = collections.deque()
    running: list[RunningCheck] = []
    accuracy: dict[str, float] = {}  # of models as they are given: the same for every check

    def end(check: RunningCheck) -> None:
        running.remove(check)
        check.end({other.process.pid for other in running})

    try:
        while True:
            while waiting and len(running) < jobs:
                order = waiting.popleft()
                running.append(RunningCheck(order | {"accuracy_before": accuracy.get(order["model"])}, pipe))
            ends = [check.process.sentinel for check in running]
            if pipe in wait([pipe, *ends], LOOK if running else None):
                waiting.append(json.loads(pipe.recv_bytes()))
            for check in [check for check in running if check.has_ended()]:
                end(check)
                if check.measured and (known := check.measured["metrics"].get("accuracy_before")) is not None:
                    accuracy[check.order["model"]] = known
                pipe.send_bytes(json.dumps(check.answer()).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # whoever ordered is gone, or wants no more
    finally:
        for check in list(running):
            end(check)


def main() -> None:
    """Serve on the connection that the command line names."""
    descriptor, jobs, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(descriptor), jobs, device)


if __name__ == "__main__":
    main()
