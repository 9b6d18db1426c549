"""Run notebooks in processes of their own: so many at once, none over its time, none left behind."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from failurelab_course import eras, processes
from failurelab_course.notebook_runs import worker
from failurelab_course.outcomes import Outcome

# Seconds that processes of a finished notebook have to end by themselves: an era's kernel first notices that its
# notebook is gone.
PATIENCE = 15.0
# Seconds between two lines that say how far the notebooks are; and between two looks at an era in the making.
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


class Run:
    """The process that runs one notebook. `result` is NOT RUN until the process says otherwise."""

    def __init__(self, result: Result, order: pathlib.Path, environment: dict[str, str], say: Callable[[str], None]):
        self.result, self._order, self._say = result, order, say
        self._mark = uuid.uuid4().hex
        self._environment = environment | {processes.MARK: self._mark}
        self._process: subprocess.Popen | None = None
        self._ended = ""
        self._end = threading.Event()
        self._lock = threading.Lock()

    def execute(self, time_limit: float) -> None:
        """Run the notebook to its end, over `time_limit` seconds, or until `end`; leave nothing that it started."""
        self._wait_for_eras()
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
        where = f", era {', '.join(result.eras)}" if result.eras else ""
        self._say(f"{result.name}: started, {result.of} cells{where}")
        reported: dict[str, Any] = {}
        with temporary, self._process:
            try:
                for line in self._process.stdout:
                    reported |= json.loads(line)
                    result.cells = reported["done"]
            finally:
                timer.cancel()
            self._process.wait()
            processes.end(lambda: processes.marked(self._mark), 0 if self._ended else PATIENCE)
        result.seconds = time.monotonic() - start
        result.peak_bytes = reported.get("peak_bytes")
        result.status, result.reason = self._outcome(reported, time_limit)
        self._say(f"{result.name}: {result.status} after {result.seconds:.0f} s")

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def can_start(self) -> bool:
        """Whether no set-up is making an era of this notebook."""
        return not any(era.is_being_made for era in eras.known() if era.name in self.result.eras)

    def _wait_for_eras(self) -> None:
        """Wait while a set-up makes an era of this notebook; what cannot be made, the cell that needs it tells."""
        for era in [era for era in eras.known() if era.name in self.result.eras]:
            said = ""
            while era.is_being_made and not self._end.wait(LOOK_EVERY):
                if (line := era.setup_line) != said:
                    self._say(f"{self.result.name}: waits. {line}")
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


def execute(runs: Sequence[Run], jobs: int, time_limit: float, say: Callable[[str], None]) -> None:
    """Execute the runs, `jobs` at once, and fill in their results. However it is left, no process stays.

    Those whose eras are still being made come last. Now and then it says at which cell each is.
    """
    with ThreadPoolExecutor(jobs) as pool:
        ordered = sorted(runs, key=lambda run: not run.can_start)
        pending = {pool.submit(run.execute, time_limit) for run in ordered}
        try:
            while pending:
                done, pending = wait(pending, LINE_EVERY, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if running := [run.result for run in runs if run.is_running]:
                    cells = (f"{one.name} at cell {min(one.cells + 1, one.of)} of {one.of}" for one in running)
                    say("; ".join(cells))
        finally:  # after an interrupt, or an error here, too
            pool.shutdown(wait=False, cancel_futures=True)
            for run in runs:
                run.end()
