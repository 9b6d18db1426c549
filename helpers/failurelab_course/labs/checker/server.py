"""Checks of many scripts in one era: each is a process of its own, watched, and ended with all that it started.

    python -m failurelab_course.labs.checker.server PIPE JOBS

Orders and answers are JSON, sent over the connection that has the descriptor PIPE. The first answer says which of the
labs' needs do not import, `{"broken": {...}}`; then each order is a check (`client.Server.check`), and its answer holds
what `measure.run` measured, or how the check ended. When the connection is closed, this process ends its checks and
itself.

On the CPU a check is forked by the standard library's fork server, which has imported the libraries once (`preload`).
On a GPU it is a fresh Python, which pays for its imports: CUDA cannot be used in the fork of a process that has so much
as counted GPUs, and libraries count them when they are imported.

Memory is watched as the resident memory of a check and of everything that it started: a limit on address space would
stop torch, which reserves far more than it uses.
"""

import collections
import contextlib
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import secrets
import shutil
import signal
import sys
import time
import unittest.mock
from collections.abc import Container
from typing import Any

import psutil

from failurelab_course import processes, state_file
from failurelab_course.labs import metrics
from failurelab_course.labs.checker import process

POLL = 0.2  # seconds between two looks at the clock and at a check's own memory; an end is known at once
LOOK = 1.0  # seconds between two looks at all that it started, for which every process of the machine is asked
# As many as a DataLoader or two may want; a fork bomb is stopped before the machine is.
PROCESSES = 32
# By the device of a check; see the module's text.
_START = {"cpu": "forkserver", "cuda": "spawn"}


class Check:
    """One check that runs: its order, its process, and which limit it broke, if any."""

    def __init__(self, order: dict[str, Any]):
        self.order, self.over = order, ""
        self.folder = pathlib.Path(order["folder"])
        order["answer"] = f"answer-{secrets.token_hex(8)}.json"  # a script cannot write it in our place
        for part in ("work", "home", "tmp"):
            (self.folder / part).mkdir(parents=True)
        shutil.copyfile(order["script"], self.folder / "work" / "train.py")
        shutil.copytree(order["model"], self.folder / "model")
        context = multiprocessing.get_context(_START[order["device"]])
        self.process = context.Process(target=process.run, args=(order,))
        self.start = self.looked = time.monotonic()
        with unittest.mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": order["visible"]}):
            self.process.start()

    def has_ended(self) -> bool:
        """Return whether it ended by itself, or is over a limit and must be ended."""
        if self.process.exitcode is None:
            self.over = self._broken_limit()
        return bool(self.over) or self.process.exitcode is not None

    def _broken_limit(self) -> str:
        """Return which limit it is over, in words, or an empty text."""
        now = time.monotonic()
        if now - self.start > self.order["time_limit"]:
            return f"over its time limit of {self.order['time_limit']:g} s"
        if now - self.looked < LOOK and own_memory(self.process.pid) < self.order["memory_limit"] * 2**20:
            return ""
        self.looked = now
        family = descendants(self.process.pid)
        held = sum(map(resident, family)) // 2**20
        if held > self.order["memory_limit"]:
            return f"over its memory limit of {self.order['memory_limit']} MiB: it held {held}"
        if len(family) > PROCESSES:
            return f"over its limit of {PROCESSES} processes: it had started {len(family)}"
        return ""

    def end(self) -> None:
        """End it and all that it started, and wait for its end."""
        processes.end(lambda: descendants(self.process.pid))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def answer(self) -> dict[str, Any]:
        """Return what came of it, and remove its folder; it must have been ended."""
        code, folder, log = self.process.exitcode, self.folder, self.folder / "output.txt"
        answer: dict[str, Any] = {"id": self.order["id"], "seconds": time.monotonic() - self.start}
        if self.over:
            answer["ended"] = self.over
        elif (folder / self.order["answer"]).is_file():
            answer["measured"] = json.loads((folder / self.order["answer"]).read_text())
        elif not (folder / "work").is_dir():
            answer["ended"] = "deleted the folder that it ran in (a copy: your own files are as they were)"
        elif code == process.BROKE:
            said = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
            why = state_file.full_disk(folder) or (said[-1][:300] if said else "nothing was said")
            answer["environment"] = f"the check could not be done: {why}"
        elif code == -signal.SIGKILL:
            answer["environment"] = "the system killed the run (signal 9), as it does when memory runs out"
        elif code < 0:
            answer["ended"] = f"ended by signal {-code} before it was measured"
        else:
            answer["ended"] = f"left by itself with status {code} before it was measured"
        answer["output"] = log.read_text(errors="replace")[-4000:] if log.is_file() else ""
        shutil.rmtree(folder, ignore_errors=True)
        return answer


def descendants(pid: int) -> list[psutil.Process]:
    """Return a process and everything below it that runs; nothing where it has ended."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def own_memory(pid: int) -> int:
    """Return the resident bytes of a process alone, with all that it shares; 0 where it has ended."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def resident(process: psutil.Process) -> int:
    """Return the resident bytes of a process; what it shares with others, as after a fork, is divided among them."""
    try:
        memory = process.memory_full_info()
    except psutil.Error:  # it has ended meanwhile
        return 0
    return getattr(memory, "pss", memory.uss)  # uss: where the system does not divide


def end_orphans(keep: Container[int]) -> None:
    """End whatever fell to this process when its check ended: a check may leave nothing behind."""
    own = psutil.Process()

    def orphans() -> list[psutil.Process]:
        left = [child.pid for child in own.children() if child.pid not in keep]
        return [process for pid in left for process in descendants(pid)]

    processes.end(orphans)


def broken_needs(folder: pathlib.Path) -> dict[str, str]:
    """Start the fork server, and return what its imports say."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["failurelab_course.labs.checker.preload"])
    report = folder / "imports.json"
    first = context.Process(target=process.report_imports, args=(report,))
    first.start()
    first.join()
    if first.exitcode:
        raise SystemExit(first.exitcode)  # why is the last that it printed
    return json.loads(report.read_text())


def accuracy_of(model: str, folder: pathlib.Path) -> float:
    """Return the accuracy of a model as it is given, measured in a process of its own that never runs a script."""
    report = folder / "accuracy.json"
    clean = multiprocessing.get_context("forkserver").Process(target=process.report_accuracy, args=(model, report))
    clean.start()
    clean.join()
    if clean.exitcode:
        raise SystemExit(clean.exitcode)
    return json.loads(report.read_text())


def serve(pipe: multiprocessing.connection.Connection, jobs: int) -> None:
    """Do the orders that come over the connection, so many at once, until it is closed."""
    process.adopt_orphans()
    pipe.send_bytes(json.dumps({"broken": broken_needs(pathlib.Path.cwd())}).encode())
    helpers = psutil.Process().children()  # the fork server, and the tracker that multiprocessing has with it
    waiting: collections.deque[dict[str, Any]] = collections.deque()
    running: list[Check] = []
    accuracy = functools.cache(functools.partial(accuracy_of, folder=pathlib.Path.cwd()))  # the same for every check

    def end(check: Check) -> None:
        running.remove(check)
        check.end()
        end_orphans({helper.pid for helper in helpers} | {other.process.pid for other in running})

    try:
        while True:
            while waiting and len(running) < jobs:
                order = waiting.popleft()
                before = accuracy(order["model"]) if "accuracy_before" in metrics.of(order["kind"]) else None
                running.append(Check(order | {"accuracy_before": before}))
            ended = [check.process.sentinel for check in running]
            if pipe in multiprocessing.connection.wait([pipe, *ended], POLL if running else None):
                waiting.append(json.loads(pipe.recv_bytes()))
            if any(helper.status() == psutil.STATUS_ZOMBIE for helper in helpers):
                raise RuntimeError("the process that forks checks was ended, by a check or by the system")
            for check in [check for check in running if check.has_ended()]:
                end(check)
                pipe.send_bytes(json.dumps(check.answer()).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # whoever ordered is gone, or wants no more
    finally:
        for check in list(running):
            end(check)


def main() -> None:
    """Serve on the connection that the command line names."""
    descriptor, jobs = map(int, sys.argv[1:])
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(multiprocessing.connection.Connection(descriptor), jobs)


if __name__ == "__main__":
    main()
