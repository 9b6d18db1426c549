"""Watch child processes that run notebooks: so many at once, a bar for each, none over its time, none left behind.

A kernel, and an era's kernel below it, run in process groups of their own, so ending the child's group would leave
them. Every process of a run carries a token in its environment instead; by that it is found, and ended by its id.
"""

import json
import os
import pathlib
import selectors
import subprocess
import sys
import time
import uuid
from typing import Any

from failurelab_course.runs import worker as runner

# Seconds that processes of a finished notebook have to end by themselves: an era's kernel first notices that its
# notebook is gone.
PATIENCE = 15.0


class Child:
    """One notebook's process: `outcome` is what it reported at its end, None until then."""

    def __init__(self, name: str, order: pathlib.Path, log: pathlib.Path, environment: dict[str, str], cells: int):
        self.name, self.order, self.log, self.cells = name, order, log, cells
        self.token = uuid.uuid4().hex
        self.environment = environment | {runner.TOKEN: self.token}
        self.done = 0
        self.started: float | None = None
        self.seconds = 0.0
        self.outcome: dict[str, Any] | None = None
        self.process: subprocess.Popen | None = None
        self._rest = b""

    def start(self) -> None:
        """Start the process, in a session of its own, so that an interrupt from the keyboard comes to us alone."""
        self.started = time.monotonic()
        reading, writing = os.pipe()
        with open(self.log, "wb") as log:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "failurelab_course.runs.worker", str(self.order), str(writing)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    pass_fds=(writing,),
                    start_new_session=True,
                )
            finally:
                os.close(writing)
        self.pipe = reading

    def read(self) -> bool:
        """Take in what it reported; return False once it has closed its end."""
        data = os.read(self.pipe, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            self.done = told.get("done", self.done)
            if "status" in told:
                self.outcome = told
        return bool(data)

    def close(self) -> None:
        """Reap a process that has ended, and end whatever of its run is left after PATIENCE seconds."""
        code = self.process.wait()
        runner.end(self.token, PATIENCE)
        self._closed()
        if self.outcome is None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            said = runner.first_line(lines[-1]) if lines else "nothing"
            self.outcome = {
                "status": "ENVIRONMENT",
                "reason": f"its runner ended with status {code} and no outcome; it said last: {said} ({self.log.name})",
            }

    def kill(self, limit: float | None = None) -> None:
        """End the process and all that it started; `limit` says that it was over its time."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        runner.end(self.token)
        self._closed()
        if limit is not None:
            self.outcome = {
                "status": "FAIL",
                "reason": f"over its time limit of {limit:g} s, after {self.done} of {self.cells} cells; "
                "its kernel and all that this started were ended",
            }

    def _closed(self) -> None:
        self.process.stdin.close()
        os.close(self.pipe)
        self.seconds = time.monotonic() - self.started


def run(children: list[Child], jobs: int, time_limit: float, show: bool) -> None:
    """Run all children, `jobs` at once, and fill in their outcomes. However it is left, no process stays."""
    waiting, running = list(children), []
    display = _display(children) if show else _Silent()
    with selectors.DefaultSelector() as selector, display:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    child = waiting.pop(0)
                    running.append(child)
                    child.start()
                    selector.register(child.pipe, selectors.EVENT_READ, child)
                    display.started(child)
                told = {key.data: key.data.read() for key, _ in selector.select(timeout=0.25)}
                for child in list(running):
                    late = time.monotonic() - child.started > time_limit
                    if told.get(child, True) and not late:
                        display.progressed(child)
                        continue
                    selector.unregister(child.pipe)
                    child.kill(time_limit) if told.get(child, True) else child.close()
                    running.remove(child)
                    display.ended(child)
        finally:
            for child in running:
                child.kill()


class _Silent:
    """Shows nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def started(self, child: Child) -> None:
        """Show that it runs."""

    def progressed(self, child: Child) -> None:
        """Show how far it is."""

    def ended(self, child: Child) -> None:
        """Show how it ended."""


class _Lines(_Silent):
    """One line when a notebook starts and one when it ends: for a log, which cannot show bars."""

    def started(self, child: Child) -> None:
        print(f"{child.name}: started, {child.cells} cells", flush=True)

    def ended(self, child: Child) -> None:
        print(f"{child.name}: {child.outcome['status']} after {child.seconds:.0f} s", flush=True)


class _Bars(_Silent):
    """A bar for each notebook."""

    def __init__(self, children: list[Child], console):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cells")
        self.progress = Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[status]}"), console=console)
        self.tasks = {
            child: self.progress.add_task(child.name, total=child.cells, status="waiting", start=False)
            for child in children
        }

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def started(self, child: Child) -> None:
        self.progress.start_task(self.tasks[child])
        self.progress.update(self.tasks[child], status="running")

    def progressed(self, child: Child) -> None:
        self.progress.update(self.tasks[child], completed=child.done)

    def ended(self, child: Child) -> None:
        self.progress.update(self.tasks[child], completed=child.done, status=child.outcome["status"])
        self.progress.stop_task(self.tasks[child])


def _display(children: list[Child]) -> _Silent:
    from rich.console import Console

    console = Console()
    return _Bars(children, console) if console.is_terminal else _Lines()
