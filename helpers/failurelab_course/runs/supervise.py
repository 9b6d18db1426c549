"""Run notebooks in processes of their own: so many at once, a bar for each, none over its time, none left behind."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from failurelab_course import eras, processes
from failurelab_course.outcomes import Outcome
from failurelab_course.runs import worker

# Seconds that processes of a finished notebook have to end by themselves: an era's kernel first notices that its
# notebook is gone.
PATIENCE = 15.0
# Seconds between two lines that say in a log how far the notebooks are; and between two looks at an era in the making.
LINE_EVERY, LOOK_EVERY = 30.0, 0.5


@dataclasses.dataclass(kw_only=True)
class Result:
    """What became of one notebook.

    `cells` ran without error, `of` there are; `eras` are those that its card names; `peak_bytes` is None where unknown.
    """

    name: str
    status: Outcome = Outcome.NOT_RUN
    reason: str = "not started"
    cells: int = 0
    of: int
    eras: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int | None = None
    parameters: dict[str, Any]
    copy: pathlib.Path
    html: pathlib.Path | None
    log: pathlib.Path
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether it held; a notebook that was not run did not."""
        return self.status == Outcome.PASS

    def figures(self, **wanted: Any) -> dict[str, Any]:
        """Return the figures of the only record whose fields are as wanted, such as `state="healthy", era="today"`.

        Raises:
            LookupError: no record, or more than one, is so.
        """
        found = [record for record in self.records if all(record.get(k) == v for k, v in wanted.items())]
        if len(found) != 1:
            raise LookupError(f"{len(found)} of {len(self.records)} records of {self.name} have {wanted}")
        return found[0]["figures"]


class _Display:
    """A bar for each notebook; in a log, which cannot show bars, a line at its start and end, and now and then."""

    def __init__(self, results: Sequence[Result], show: bool):
        console = Console()
        self._lines = show and not console.is_terminal
        self._running: dict[str, Result] = {}
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cells")
        status = TextColumn("{task.fields[status]}")
        disable = not show or self._lines
        self.bars = Progress(*columns, TimeElapsedColumn(), status, console=console, disable=disable)
        self._tasks = {
            result.name: self.bars.add_task(result.name, total=result.of, status="waiting", start=False)
            for result in results
        }

    def start(self, result: Result) -> None:
        """Show that it runs."""
        if self._lines:
            where = f", era {', '.join(result.eras)}" if result.eras else ""
            print(f"{result.name}: started, {result.of} cells{where}", flush=True)
        self._running[result.name] = result
        self.bars.start_task(self._tasks[result.name])
        self.update(result, "running")

    def sign_of_life(self) -> None:
        """Say in a log at which cell each running notebook is."""
        running = [
            f"{each.name} at cell {min(each.cells + 1, each.of)} of {each.of}" for each in self._running.values()
        ]
        if self._lines and running:
            print("; ".join(running), flush=True)

    def wait(self, result: Result, line: str) -> None:
        """Show that it waits for an era, and what that era's set-up says."""
        if self._lines:
            print(f"{result.name}: waits. {line}", flush=True)
        self.update(result, line)

    def update(self, result: Result, status: str) -> None:
        """Show how far it is."""
        self.bars.update(self._tasks[result.name], completed=result.cells, status=status)

    def end(self, result: Result) -> None:
        """Show how it ended."""
        if self._lines:
            print(f"{result.name}: {result.status} after {result.seconds:.0f} s", flush=True)
        self._running.pop(result.name, None)
        self.update(result, result.status)
        self.bars.stop_task(self._tasks[result.name])


class Run:
    """The process that runs one notebook. `result` is NOT RUN until the process says otherwise."""

    def __init__(self, result: Result, order: pathlib.Path, environment: dict[str, str]):
        self.result, self._order = result, order
        self._mark = uuid.uuid4().hex
        self._environment = environment | {processes.MARK: self._mark}
        self._process: subprocess.Popen | None = None
        self._ended = ""
        self._end = threading.Event()
        self._lock = threading.Lock()

    def execute(self, time_limit: float, display: _Display) -> None:
        """Run the notebook to its end, over `time_limit` seconds, or until `end`; leave nothing that it started."""
        self._wait_for_eras(display)
        result, start = self.result, time.monotonic()
        with self._lock:
            if self._ended:
                return
            # A notebook that is ended leaves temporary files, its connection file among them: they go with this folder.
            temporary = tempfile.TemporaryDirectory(prefix="failurelab-run-", ignore_cleanup_errors=True)
            # In a session of its own, so that an interrupt from the keyboard comes to us alone.
            with open(result.log, "wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", worker.__name__, str(self._order)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment | {"TMPDIR": temporary.name},
                    start_new_session=True,
                )
        timer = threading.Timer(time_limit, self.end, ["late"])
        timer.start()
        display.start(result)
        reported: dict[str, Any] = {}
        with temporary, self._process:
            try:
                for line in self._process.stdout:
                    reported |= json.loads(line)
                    result.cells = reported["done"]
                    display.update(result, "running")
            finally:
                timer.cancel()
            self._process.wait()
            processes.end(lambda: processes.marked(self._mark), 0 if self._ended else PATIENCE)
        result.seconds = time.monotonic() - start
        result.peak_bytes = reported.get("peak_bytes")
        result.status, result.reason = self._outcome(reported, time_limit)
        display.end(result)

    @property
    def can_start(self) -> bool:
        """Whether no set-up is making an era of this notebook."""
        return not any(era.is_being_made for era in eras.known() if era.name in self.result.eras)

    def _wait_for_eras(self, display: _Display) -> None:
        """Wait while a set-up makes an era of this notebook; what cannot be made, the cell that needs it tells."""
        for era in [era for era in eras.known() if era.name in self.result.eras]:
            said = ""
            while era.is_being_made and not self._end.wait(LOOK_EVERY):
                if (line := era.setup_line) != said:
                    display.wait(self.result, line)
                said = line

    def _outcome(self, reported: dict[str, Any], time_limit: float) -> tuple[Outcome, str]:
        result = self.result
        if self._ended == "late":
            done = f"after {result.cells} of {result.of} cells; its kernel and all that this started were ended"
            return Outcome.FAIL, f"over its time limit of {time_limit:g} s, {done}"
        if "status" in reported:
            return Outcome(reported["status"]), reported["reason"]
        if self._ended:
            return Outcome.NOT_RUN, self._ended
        lines = result.log.read_text(errors="replace").strip().splitlines()
        said = worker.first_line(lines[-1]) if lines else "nothing"
        reason = f"its runner ended with status {self._process.returncode} and no outcome; it said last: {said}"
        return Outcome.ENVIRONMENT, f"{reason} ({result.log.name})"

    def end(self, why: str = "interrupted") -> None:
        """End the process at once, if it runs; `execute` then ends all that it started, and returns."""
        with self._lock:
            self._ended = self._ended or why
            self._end.set()
            if self._process is not None:
                self._process.kill()


def execute(runs: Sequence[Run], jobs: int, time_limit: float, show: bool) -> None:
    """Execute the runs, `jobs` at once, and fill in their results. However it is left, no process stays.

    Those whose eras are still being made come last.
    """
    display = _Display([run.result for run in runs], show)
    with display.bars, ThreadPoolExecutor(jobs) as pool:
        ordered = sorted(runs, key=lambda run: not run.can_start)
        pending = {pool.submit(run.execute, time_limit, display) for run in ordered}
        try:
            while pending:
                done, pending = wait(pending, LINE_EVERY, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                display.sign_of_life()
        finally:  # after an interrupt, or an error here, too
            pool.shutdown(wait=False, cancel_futures=True)
            for run in runs:
                run.end()
