"""One notebook, executed in a process of its own; `supervise` starts it and reads what it reports.

    python -m failurelab_course.notebook_runs.worker ORDER.json

The order names the notebook, the copy to write, and the parameters. Reports are JSON, one object a line, on stdout; the
kernel and whatever it starts write as they like, and that goes to stderr. The kernel is always this interpreter's: a
kernelspec named python3 may belong to another Python (a user's own hides the environment's).

When stdin closes, the process that gave the order is gone, however it ended: then everything started here is ended.
"""

import json
import os
import pathlib
import re
import resource
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from failurelab_course import processes
from failurelab_course.notebook_runs import stored
from failurelab_course.outcomes import Outcome

# Exceptions that say, in a notebook, that the question was not asked. By name: they come from another process.
NOT_RUN = "NotRun"
ERA_ERRORS = ("EraError", "EraMagicError", "EraKernelDied")
NOT_READY = re.compile(r"era \S+ (is (missing|broken|stale)|did not (start|answer))")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def first_line(text: str) -> str:
    """Return the first line that says something, without colours, cut at 400 characters."""
    line = next(filter(None, map(str.strip, _COLOURS.sub("", text).splitlines())), "")
    return line if len(line) <= 400 else f"{line[:399]}…"


def is_setup(source: str) -> bool:
    """Whether a cell is the notebook's quiet first one."""
    return "notebook.setup(" in source


class _Watch:
    """Follows the cells while they run, and reports each.

    `asked` turns true with the first cell after the set-up: what breaks before it says nothing about the question.
    """

    def __init__(self, report: Callable[..., None], has_setup: bool):
        self.report = report
        self.done = 0
        self.asked = not has_setup
        self._in_setup = False

    def started(self, cell, cell_index):
        if cell.cell_type == "code" and cell.source.strip():
            self.asked = self.asked or self._in_setup
            self._in_setup = is_setup(cell.source)

    def executed(self, cell, cell_index, execute_reply):
        if execute_reply["content"]["status"] == "ok" and "injected-parameters" not in cell.metadata.get("tags", []):
            self.done += 1
            self.report(done=self.done)


def execute(order: dict[str, Any], report: Callable[..., None]) -> dict[str, Any]:
    """Execute the notebook of `order`; return its outcome: `status`, `reason` and the number of cells `done`."""
    import nbformat
    import papermill
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from papermill.exceptions import PapermillExecutionError

    class ThisPythonsKernel(AsyncKernelManager):
        def __init__(self, **options: Any):
            super().__init__(**options)
            # Sockets in the run's own folder: a port may be taken by another run before the kernel has it. The path of
            # a socket is at most some hundred bytes long.
            place = os.path.join(tempfile.gettempdir(), "kernel")
            if len(place) < 80:
                self.transport, self.ip = "ipc", place

        @property
        def kernel_spec(self):
            return KernelSpec(**get_kernel_dict())

    watch = _Watch(report, order["has_setup"])
    status, reason = Outcome.PASS, ""
    try:
        papermill.execute_notebook(
            order["notebook"],
            order["copy"],
            parameters=order["parameters"],
            kernel_name="python3",
            kernel_manager_class=ThisPythonsKernel,
            cwd=os.path.dirname(order["notebook"]),
            progress_bar=False,
            start_timeout=180,
            iopub_timeout=60,
            on_cell_start=watch.started,
            on_cell_executed=watch.executed,
        )
    except PapermillExecutionError as error:
        status, reason = _outcome_of_cell(error, order, watch.asked)
    except Exception as error:  # papermill's, nbclient's or the kernel's own: each is reported, none is hidden
        early = watch.done == 0 or not watch.asked
        status = Outcome.ENVIRONMENT if early else Outcome.FAIL
        reason = f"after {watch.done} cells: {type(error).__name__}: {first_line(str(error))}"
        if type(error).__name__ == "DeadKernelError":
            reason += " (it crashed, or the system ended it: memory may have run out)"
    if os.path.exists(order["copy"]):
        executed = nbformat.read(order["copy"], as_version=4)
        if status == Outcome.PASS:
            status, reason = _all_cells_ran(executed)
        _export(executed, order)
    return {"status": status, "reason": reason, "done": watch.done}


def _outcome_of_cell(error: Any, order: dict[str, Any], asked: bool) -> tuple[Outcome, str]:
    """Tell a failed cell from a run that broke before its question, or that says itself it was not run."""
    name, text = error.ename, first_line(error.evalue)
    if name == NOT_RUN:
        return Outcome.NOT_RUN, text
    if name in ERA_ERRORS and NOT_READY.search(text):
        return Outcome.ENVIRONMENT, text
    if name == "CellExecutionError" and not text:  # a magic that is unknown or misused: told on stderr alone
        text = first_line(_last_stderr(order["copy"], error.exec_count))
    broke = not asked or "No space left on device" in text
    return Outcome.ENVIRONMENT if broke else Outcome.FAIL, f"In [{error.exec_count}]: {name}: {text}"


def _last_stderr(copy: str, count: int | None) -> str:
    import nbformat

    for cell in nbformat.read(copy, as_version=4).cells:
        if cell.cell_type == "code" and cell.execution_count == count:
            return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stderr")
    return ""


def _all_cells_ran(executed: Any) -> tuple[Outcome, str]:
    """Hold that no cell was left out: papermill takes `sys.exit(0)` halfway for a success."""
    for number, cell in enumerate(executed.cells):
        due = cell.cell_type == "code" and cell.source.strip() and "skip-execution" not in cell.metadata.get("tags", [])
        if due and cell.execution_count is None:
            return Outcome.FAIL, f"it ended early, without an error: cell {number + 1} of the copy did not run"
    if any(out.output_type == "error" for cell in executed.cells for out in cell.get("outputs", [])):
        return Outcome.FAIL, "it ended early: a cell left by sys.exit"
    return Outcome.PASS, ""


def _export(executed: Any, order: dict[str, Any]) -> None:
    from nbconvert import HTMLExporter

    here = str(pathlib.Path(__file__).parent)
    exporter = HTMLExporter(extra_template_paths=[here], template_file="page.html.j2")
    for cell in filter(stored.is_folded, executed.cells):
        cell.metadata["transient"] = {"remove_source": True}
    resources = {"metadata": {"name": order["name"]}, "ran_on": order["ran_on"]}
    body, _ = exporter.from_notebook_node(executed, resources=resources)
    pathlib.Path(order["html"]).write_text(body, encoding="utf-8")


def _follow_the_caller(mark: str) -> None:
    """End everything when stdin closes: the caller is gone, and none of its children may stay."""
    while os.read(0, 1024):
        pass
    processes.end(lambda: processes.marked(mark))
    os._exit(1)


def main(order_file: str) -> int:
    """Execute one order; the outcome is reported, and the exit status is 0 whenever there is one."""
    order = json.loads(pathlib.Path(order_file).read_text())
    reports = os.dup(1)  # which no child inherits
    os.dup2(2, 1)

    def report(**what: Any) -> None:
        os.write(reports, (json.dumps(what) + "\n").encode())

    threading.Thread(target=_follow_the_caller, args=(os.environ[processes.MARK],), daemon=True).start()
    outcome = execute(order, report)
    # Of the kernel and its children, the one that held most; ru_maxrss counts KiB on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    report(**outcome, peak_bytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
