"""Run notebooks in processes of their own: so many at once, a bar for each, none over its time, none left behind."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from failurelab_course import processes
from failurelab_course.outcomes import Outcome
from failurelab_course.runs import worker

# Seconds that processes of a finished notebook have to end by themselves: an era's kernel first notices that its
# notebook is gone.
PATIENCE = 15.0


@dataclasses.dataclass(kw_only=True)
class Result:
    """What became of one notebook. `cells` ran without error, `of` there are; `peak_bytes` is None where unknown."""

    name: str
    status: Outcome = Outcome.NOT_RUN
    reason: str = "not started"
    cells: int = 0
    of: int
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
    """A bar for each notebook; in a log, which cannot show bars, a line when one starts and when one ends."""

    def __init__(self, results: Sequence[Result], show: bool):
        console = Console()
        self._lines = show and not console.is_terminal
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
            print(f"{result.name}: started, {result.of} cells", flush=True)
        self.bars.start_task(self._tasks[result.name])
        self.update(result, "running")

    def update(self, result: Result, status: str) -> None:
        """Show how far it is."""
        self.bars.update(self._tasks[result.name], completed=result.cells, status=status)

    def end(self, result: Result) -> None:
        """Show how it ended."""
        if self._lines:
            print(f"{result.name}: {result.status} after {result.seconds:.0f} s", flush=True)
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
        self._lock = threading.Lock()

    def execute(self, time_limit: float, display: _Display) -> None:
        """Run the notebook to its end, over `time_limit` seconds, or until `end`; leave nothing that it started."""
        result, start = self.result, time.monotonic()
        with self._lock:
            if self._ended:
                return
            # In a session of its own, so that an interrupt from the keyboard comes to us alone.
            with open(result.log, "wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", worker.__name__, str(self._order)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
        timer = threading.Timer(time_limit, self.end, ["late"])
        timer.start()
        display.start(result)
        reported: dict[str, Any] = {}
        with self._process:
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
            if self._process is not None:
                self._process.kill()


def execute(runs: Sequence[Run], jobs: int, time_limit: float, show: bool) -> None:
    """Execute the runs, `jobs` at once, and fill in their results. However it is left, no process stays."""
    display = _Display([run.result for run in runs], show)
    with display.bars, ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run.execute, time_limit, display) for run in runs]
        try:
            for future in futures:
                future.result()
        finally:  # after an interrupt, or an error here, too
            pool.shutdown(wait=False, cancel_futures=True)
            for run in runs:
                run.end()
