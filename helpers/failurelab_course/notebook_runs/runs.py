"""Run the course's notebooks by papermill, several at once, each with an outcome that holds.

A notebook that ran is not yet a notebook that held. So each run ends as one of four results:

- PASS: every cell ran, and none failed.
- FAIL: a cell failed, the notebook ended early, or its time ran out.
- ENVIRONMENT: it broke before the question was asked: the kernel did not start, the set-up cell failed, an era is not
  ready, the disk is full.
- NOT RUN: the notebook said so itself (`notebook.not_run(reason)`: no GPU, say), or it was interrupted. Never a pass.

Executed copies, HTML, evidence records, `results.json` and `junit.xml` are kept under `.course/runs/`.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from failurelab._outputs import make_folder
from failurelab_course import eras, outcomes, processes, state_file
from failurelab_course.experiments import machine
from failurelab_course.notebook_runs import stored
from failurelab_course.notebook_runs.notebooks import CourseError, Notebook, find
from failurelab_course.outcomes import Outcome

# Seconds that processes of a finished notebook have to end by themselves: an era's kernel first notices that its
# notebook is gone.
PATIENCE = 15.0
# Seconds between two lines that say how far the notebooks are; and between two looks at an era in the making.
LINE_EVERY, LOOK_EVERY = 30.0, 0.5
# Exceptions that say, in a notebook, that the question was not asked. By name: they come from another process.
NOT_RUN, INTERRUPTED = "NotRun", "interrupted"
ERA_ERRORS = ("EraError", "EraMagicError", "EraKernelDied")
NOT_READY = re.compile(r"era \S+ (is (missing|broken|stale)|did not (start|answer))")


@dataclasses.dataclass(kw_only=True)
class NotebookResult:
    """What became of one notebook.

    `cells` ran without error, `of` there are; `eras` are those that its card names; `peak_bytes` is the most that its
    kernel, or an era's below it, held when a cell had ended, None where unknown.
    """

    name: str
    status: Outcome = Outcome.NOT_RUN
    reason: str = "not started"
    cells: int = 0
    of: int
    eras: list[str]
    seconds: float = 0.0
    peak_bytes: int | None = None
    parameters: dict[str, Any]
    copy: pathlib.Path
    html: pathlib.Path | None = None
    log: pathlib.Path
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def figures(self, **wanted: Any) -> dict[str, Any]:
        """Return the figures of the only record whose fields are as wanted, such as `state="healthy", era="today"`.

        Raises:
            LookupError: no record, or more than one, is so.
        """
        found = [record for record in self.records if all(record.get(k) == v for k, v in wanted.items())]
        if len(found) != 1:
            raise LookupError(f"{len(found)} of {len(self.records)} records of {self.name} have {wanted}")
        return found[0]["figures"]


class NotebookRun:
    """One notebook on its way to its result; each of its processes has `mark` in its environment, to be ended by it."""

    def __init__(self, notebook: Notebook, parameters: dict[str, Any], out: pathlib.Path, mark: str):
        self.notebook, self.mark, self.ended, self.is_running = notebook, mark, "", False
        self.result = NotebookResult(
            name=notebook.name,
            of=len(notebook.code),
            eras=eras.named_by(notebook.path),
            parameters=parameters,
            copy=out / notebook.path.name,
            log=out / "logs" / f"{notebook.name}.log",
        )
        self.evidence = out / "evidence" / notebook.name
        # Until so many cells have run, what breaks says nothing about the question.
        places = [place for place, cell in enumerate(notebook.code, 1) if "notebook.setup(" in cell.source]
        self.quiet = max(places, default=0)

    def execute(self, time_limit: float, ran_on: str) -> None:
        """Run the notebook to its end, over `time_limit` seconds, or until `end`; leave nothing that it started."""
        result = self.result
        self._wait_for_eras()
        shutil.rmtree(self.evidence, ignore_errors=True)  # what an earlier run left
        for path in (result.copy, result.copy.with_suffix(".html")):
            path.unlink(missing_ok=True)
        for path in (self.evidence, result.log.parent):
            path.mkdir(parents=True, exist_ok=True)
        where = f", era {', '.join(result.eras)}" if result.eras else ""
        print(f"{result.name}: started, {result.of} cells{where}", flush=True)
        self.is_running, start = True, time.monotonic()
        timer = threading.Timer(time_limit, self.end, [f"over its time limit of {time_limit:g} s"])
        timer.start()
        try:
            # A notebook that is ended leaves temporary files: they go with this folder.
            with tempfile.TemporaryDirectory(prefix="failurelab-run-", ignore_cleanup_errors=True) as folder:
                result.status, result.reason = self._run_cells(folder)
                processes.end(lambda: processes.marked(self.mark), 0 if self.ended else PATIENCE)
            result.html = _export(result, f"{ran_on}; eras: {', '.join(result.eras)}" if result.eras else ran_on)
            result.records = read_records(self.evidence)
        except CourseError as error:
            result.status, result.reason = Outcome.FAIL, f"its evidence cannot be read: {error}"
        except (OSError, ValueError) as error:  # a full disk cuts the copy, or the page
            result.status, result.reason = Outcome.ENVIRONMENT, f"its copy and page cannot be kept: {error}"
        finally:
            timer.cancel()
            self.is_running, result.seconds = False, time.monotonic() - start
        if self.ended:  # which may have left half a copy, or half a record
            late = self.ended != INTERRUPTED
            done = f", after {result.cells} of {result.of} cells; its kernel and all that this started were ended"
            result.status = Outcome.FAIL if late else Outcome.NOT_RUN
            result.reason = f"{self.ended}{done if late else ''}"
        print(f"{result.name}: {result.status} after {result.seconds:.0f} s", flush=True)

    def end(self, why: str) -> None:
        """End all that the notebook has started, at once; `execute` then returns."""
        self.ended = self.ended or why
        processes.end(lambda: processes.marked(self.mark))

    def eras_in_the_making(self) -> list[eras.Era]:
        """Return those of this notebook that a set-up is making now."""
        return [era for era in eras.known() if era.name in self.result.eras and era.is_being_made]

    def _wait_for_eras(self) -> None:
        """Wait while a set-up makes an era of this notebook; what cannot be made, the cell that needs it tells."""
        said = ""
        while (making := self.eras_in_the_making()) and not self.ended:
            if (line := making[0].setup_line) != said:
                print(f"{self.result.name}: waits. {line}", flush=True)
            said = line
            time.sleep(LOOK_EVERY)

    def _run_cells(self, folder: str) -> tuple[Outcome, str]:
        """Let papermill run the cells; return the outcome and its reason."""
        result = self.result
        try:
            import papermill

            logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it says of an error is the reason below
            with open(result.log, "wb") as log:
                papermill.execute_notebook(
                    str(self.notebook.path.resolve()),
                    str(result.copy),
                    parameters=result.parameters,
                    kernel_name="python3",
                    kernel_manager_class=self._kernel_manager(folder, log),
                    progress_bar=False,
                    start_timeout=180,
                    iopub_timeout=60,
                    on_cell_start=self._begun,
                    on_cell_executed=self._done,
                )
        except Exception as error:  # papermill's, nbclient's or the kernel's own: each is reported, none is hidden
            if hasattr(error, "ename"):
                return self._outcome_of_cell(error)
            reason = f"after {result.cells} cells: {type(error).__name__}: {_first_line(str(error))}"
            if type(error).__name__ == "DeadKernelError":
                reason += " (it crashed, or the system ended it: memory may have run out)"
            broke = result.cells < max(1, self.quiet) or isinstance(error, OSError)
            return Outcome.ENVIRONMENT if broke else Outcome.FAIL, reason
        # papermill takes `sys.exit(0)` halfway for a success.
        cells = stored.read(result.copy).cells
        for number, cell in enumerate(cells, 1):
            due = cell.cell_type == "code" and cell.source.strip() and "skip-execution" not in stored.tags(cell)
            if due and cell.execution_count is None:
                return Outcome.FAIL, f"it ended early, without an error: cell {number} of the copy did not run"
        if any(out.output_type == "error" for cell in cells for out in cell.get("outputs", [])):
            return Outcome.FAIL, "it ended early: a cell left by sys.exit"
        return Outcome.PASS, ""

    def _kernel_manager(self, folder: str, log: Any) -> type:
        """Return what starts this notebook's kernel: of this interpreter, with the variables of this run.

        A kernelspec named python3 may belong to another Python: a user's own hides the environment's.
        """
        from ipykernel.kernelspec import get_kernel_dict
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import AsyncKernelManager

        own = {"FAILURELAB_EVIDENCE": str(self.evidence), "FAILURELAB_SOURCE": self.result.name}
        own |= {processes.MARK: self.mark, "TMPDIR": folder}
        options = {"cwd": self.notebook.path.resolve().parent, "stdout": log, "stderr": log}
        options["env"] = os.environ | eras.find(eras.TODAY, ready=False).variables | own

        class ThisPythonsKernel(AsyncKernelManager):
            def __init__(self, **given: Any):
                super().__init__(**given)
                self.connection_file = os.path.join(folder, "kernel.json")
                # Sockets in the run's own folder: a port may be taken by another run before the kernel has it. The path
                # of a socket is at most some hundred bytes long.
                if len(folder) < 80:
                    self.transport, self.ip = "ipc", os.path.join(folder, "kernel")

            @property
            def kernel_spec(self):
                return KernelSpec(**get_kernel_dict())

            async def start_kernel(self, **given: Any):
                await super().start_kernel(**options, **given)

        return ThisPythonsKernel

    def _begun(self, cell: Any, cell_index: int) -> None:
        if self.ended:  # while the kernel was starting
            raise InterruptedError(self.ended)

    def _done(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        if execute_reply["content"]["status"] == "ok" and "injected-parameters" not in stored.tags(cell):
            self.result.cells += 1
        self.result.peak_bytes = processes.peak_bytes(processes.marked(self.mark))

    def _outcome_of_cell(self, error: Any) -> tuple[Outcome, str]:
        """Tell a failed cell from a run that broke before its question, or that says itself it was not run."""
        name, text = error.ename, _first_line(error.evalue)
        if name == NOT_RUN:
            return Outcome.NOT_RUN, text
        if name in ERA_ERRORS and NOT_READY.search(text):
            return Outcome.ENVIRONMENT, text
        if name == "CellExecutionError" and not text:  # a magic that is unknown or misused: told on stderr alone
            outputs = [out for cell in stored.read(self.result.copy).cells for out in cell.get("outputs", [])]
            text = _first_line("".join(out.text for out in outputs if out.get("name") == "stderr"))
        broke = self.result.cells < self.quiet or "No space left on device" in text
        return Outcome.ENVIRONMENT if broke else Outcome.FAIL, f"In [{error.exec_count}]: {name}: {text}"


def _first_line(text: str) -> str:
    """Return the first line that says something, without colours, cut at 400 characters."""
    lines = map(str.strip, re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).splitlines())
    line = next(filter(None, lines), "")
    return line if len(line) <= 400 else f"{line[:399]}…"


def _export(result: NotebookResult, ran_on: str) -> pathlib.Path | None:
    """Write the executed copy as HTML; return the page, None where there is no copy."""
    from nbconvert import HTMLExporter

    if not result.copy.exists():
        return None
    executed, here = stored.read(result.copy), str(pathlib.Path(__file__).parent)
    for cell in filter(stored.is_folded, executed.cells):
        cell.metadata["transient"] = {"remove_source": True}
    exporter = HTMLExporter(extra_template_paths=[here], template_file="page.html.j2")
    page, _ = exporter.from_notebook_node(executed, {"metadata": {"name": result.name}, "ran_on": ran_on})
    path = result.copy.with_suffix(".html")
    path.write_text(page, encoding="utf-8")
    return path


def run(
    names: Iterable[str] = (),
    *,
    device: str = "cpu",
    model: str = "tiny",
    seed: int = 0,
    folder: pathlib.Path | None = None,
    jobs: int = 2,
    out: pathlib.Path | None = None,
    time_limit: float = 600,
) -> list[NotebookResult]:
    """Run notebooks, several at once; say how far each is, and return what became of each, in their order.

    Args:
        names: numbers or names; all when none is given.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; what it means here is given to every notebook.
        model: a name that `models.load` knows.
        seed: the seed given to every notebook.
        folder: where the notebooks are, if not in the course.
        jobs: how many run at the same time.
        out: where copies and evidence go; a new folder under `.course/runs` if not given.
        time_limit: seconds that one notebook may take, over which its kernel and all that this started are ended.

    Raises:
        CourseError: an unknown name, or an impossible number; nothing was started.
        TierError: the device cannot be used here; nothing was started.
        KeyboardInterrupt: after all that was started was ended and what is known was written.
    """
    model_folder = pathlib.Path(model).expanduser()
    if model_folder.is_dir() and model not in ("tiny", "random-0.5b"):
        model = str(model_folder.resolve())  # for a notebook runs in its own folder
    chosen = find(names, folder)
    described = machine.describe(device)
    given = {"device": described["device"], "model": model, "seed": seed}
    if jobs < 1 or time_limit <= 0:
        raise CourseError(f"jobs must be at least 1 and the time limit above 0, not {jobs} and {time_limit}")
    out = out.resolve() if out else _new_folder()
    ran_on, mark = machine.line(described), uuid.uuid4().hex
    runs = [NotebookRun(each, given, out, f"{mark}.{number}.") for number, each in enumerate(chosen)]
    make_folder(out, "--out")
    interrupted = False
    try:
        _execute(runs, jobs, time_limit, ran_on, mark)
    except KeyboardInterrupt:
        interrupted = True
    results = [run.result for run in runs]
    kept = {
        "schema": 1,
        "ran_on": described,
        "summary": outcomes.summary(result.status for result in results),
        "exit_status": outcomes.exit_status(result.status for result in results),
        "results": [dataclasses.asdict(result) for result in results],
    }
    state_file.write(out / "results.json", json.dumps(kept, indent=1, default=str) + "\n")
    cases = [outcomes.Case("notebooks", one.name, one.status, one.reason, one.seconds) for one in results]
    outcomes.write_junit(out / "junit.xml", cases, "GRPO Failure Lab")
    _report(results, out, ran_on)
    if interrupted:
        raise KeyboardInterrupt
    return results


def _execute(runs: list[NotebookRun], jobs: int, time_limit: float, ran_on: str, mark: str) -> None:
    """Execute the runs, `jobs` at once, those whose eras are being made last. However it is left, no process stays.

    Now and then it says at which cell each is.
    """
    with processes.ended_after(mark), ThreadPoolExecutor(jobs) as pool:
        ordered = sorted(runs, key=lambda run: bool(run.eras_in_the_making()))
        pending = {pool.submit(run.execute, time_limit, ran_on) for run in ordered}
        try:
            while pending:
                done, pending = wait(pending, LINE_EVERY, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if running := [run.result for run in runs if run.is_running]:
                    cells = (f"{one.name} at cell {min(one.cells + 1, one.of)} of {one.of}" for one in running)
                    print("; ".join(cells), flush=True)
        finally:  # after an interrupt, or an error here, too
            pool.shutdown(wait=False, cancel_futures=True)
            for run in runs:
                run.end(INTERRUPTED)


def read_records(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the evidence records that a run's processes wrote into a folder.

    Raises:
        CourseError: a line is not JSON.
    """
    records = []
    for path in sorted(folder.rglob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise CourseError(f"{path.name} line {number} is not JSON: {error}") from error
    return records


def _new_folder() -> pathlib.Path:
    """Make `.course/runs/<time>` and let `.course/runs/latest` lead to it."""
    top = eras.root() / ".course" / "runs"
    folder = top / f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    link = top / f".latest.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(top / "latest")
    return folder


def _report(results: list[NotebookResult], out: pathlib.Path, ran_on: str) -> None:
    """Print the table of results, what they ran on, the line with the denominators, and where the copies are."""
    console = Console()
    table = Table("notebook", "eras", "result", "cells", "seconds", "peak MiB")
    for result in results:
        peak = f"{result.peak_bytes / 2**20:.0f}" if result.peak_bytes else "-"
        status = Text(result.status, outcomes.STYLES[result.status])
        cells, seconds = f"{result.cells} of {result.of}", f"{result.seconds:.0f}"
        table.add_row(result.name, ", ".join(result.eras) or "-", status, cells, seconds, peak)
    console.print(table)
    with contextlib.suppress(ValueError):
        out = out.relative_to(pathlib.Path.cwd())
    lines = [Text(f"{result.name}: {result.reason}") for result in results if result.reason]
    lines += [Text(ran_on), Text(outcomes.summary(result.status for result in results), "bold")]
    lines += [Text(f"Executed copies and evidence: {out}")]
    pages = [out / result.html.name for result in results if result.html]
    lines += [Text("Open " + "\n     ".join(map(str, pages)))] if pages else []
    for line in lines:
        console.print(line, soft_wrap=True)
