"""Run the course's notebooks through papermill: in parallel, each in a process of its own, with an outcome that holds.

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
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from failurelab._outputs import make_folder
from failurelab.errors import FailureLabError
from failurelab_course import eras, outcomes, state_file
from failurelab_course.experiments import machine
from failurelab_course.notebook_runs import stored, supervise, worker
from failurelab_course.notebook_runs.supervise import Result
from failurelab_course.outcomes import Outcome

# The fast CPU tier: only papermill injects other values, so these defaults are what a reader runs.
DEFAULTS = {"device": "cpu", "model": "tiny", "seed": 0}


class CourseError(FailureLabError):
    """The notebooks cannot be run as asked; the message says what was found and the next step."""


@dataclasses.dataclass(frozen=True)
class Notebook:
    """One notebook of the course, before it runs."""

    path: pathlib.Path

    @property
    def name(self) -> str:
        """Its name, such as `00_start_here`."""
        return self.path.stem

    @functools.cached_property
    def content(self) -> Any:
        """The parsed notebook.

        Raises:
            CourseError: the file cannot be read as one.
        """
        try:
            return stored.read(self.path)
        except ValueError as error:
            raise CourseError(f"notebook {error}. Next: git checkout {self.path.name}") from error

    @property
    def code(self) -> list[Any]:
        """Its code cells, empty ones left out."""
        return [cell for cell in self.content.cells if cell.cell_type == "code" and cell.source.strip()]

    def parameters(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to inject. A standard parameter at its default may be undeclared; any other must be declared.

        Raises:
            CourseError: a parameter is not declared, or its value has another type than the default.
        """
        try:
            declared, chosen = stored.declared_parameters(self.content), {}
        except SyntaxError as error:
            raise CourseError(f"notebook {self.name}: its parameters cell is no Python: {error.msg}") from error
        for name, value in given.items():
            if name in declared:
                chosen[name] = self._typed(name, value, declared[name])
            elif name not in DEFAULTS or value != DEFAULTS[name]:
                raise CourseError(
                    f"notebook {self.name} has no parameter {name!r}; it declares {', '.join(declared) or 'none'}"
                )
        return chosen

    def _typed(self, name: str, value: Any, default: Any) -> Any:
        kind = type(default)
        if default is None or type(value) is kind:
            return value
        if (kind is float and type(value) is int) or (kind is str and isinstance(value, int | float)):
            return kind(value)
        raise CourseError(
            f"notebook {self.name}: parameter {name} is of type {kind.__name__} (default {default!r}), "
            f"and {value!r} was given"
        )


def notebooks(folder: pathlib.Path | None = None) -> list[Notebook]:
    """Return all notebooks of the course, or of another folder, in their order.

    Raises:
        CourseError: there is none.
    """
    folder = pathlib.Path(folder) if folder else eras.root() / "notebooks"
    listed = [Notebook(path) for path in sorted(folder.glob("[0-9]*.ipynb"))]
    if not listed:
        raise CourseError(f"no notebook is in {folder}. Next: git checkout notebooks")
    return listed


def known(folder: pathlib.Path | None = None) -> list[str]:
    """Return the names of all notebooks, in their order."""
    return [notebook.name for notebook in notebooks(folder)]


def find(names: Iterable[str] = (), folder: pathlib.Path | None = None) -> list[Notebook]:
    """Return the named notebooks, all without a name. `0`, `00`, `00_start_here`, `start_here` name the same one.

    Raises:
        CourseError: a name is unknown (the message lists the known ones), or two notebooks have it.
    """
    every = notebooks(folder)
    chosen: list[Notebook] = []
    for name in names:
        same = [notebook for notebook in every if str(name).removesuffix(".ipynb") in _aliases(notebook.name)]
        if len(same) != 1:
            many = f"{name!r} names {len(same)} notebooks" if same else f"unknown notebook {name!r}"
            raise CourseError(f"{many}: the notebooks are {', '.join(notebook.name for notebook in every)}")
        chosen += [notebook for notebook in same if notebook not in chosen]
    return chosen or every


def _aliases(name: str) -> set[str]:
    number, _, title = name.partition("_")
    return {name, number, str(int(number)) if number.isdigit() else number, title} - {""}


def run(
    names: Iterable[str] = (),
    *,
    device: str = "cpu",
    model: str = "tiny",
    parameters: Mapping[str, Any] | None = None,
    seed: int = 0,
    folder: pathlib.Path | None = None,
    jobs: int = 2,
    out: pathlib.Path | None = None,
    time_limit: float = 600,
) -> list[Result]:
    """Run notebooks, several at once; say how far each is, and return what became of each, in their order.

    Args:
        names: numbers or names; all when none is given.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; what it means here is given to every notebook.
        model: a name that `models.load` knows.
        parameters: further parameters; every notebook named must declare them.
        seed: the seed given to every notebook.
        folder: where the notebooks are, if not in the course.
        jobs: how many run at the same time.
        out: where copies and evidence go; a new folder under `.course/runs` if not given.
        time_limit: seconds that one notebook may take, over which its kernel and all that this started are ended.

    Raises:
        CourseError: an unknown name or parameter, or an impossible number; nothing was started.
        TierError: the device cannot be used here; nothing was started.
        KeyboardInterrupt: after all children were ended and what is known was written.
    """
    model_folder = pathlib.Path(model).expanduser()
    if model_folder.is_dir() and model not in ("tiny", "random-0.5b"):
        model = str(model_folder.resolve())  # for a notebook runs in its own folder
    given = {"device": device, "model": model, "seed": seed, **(parameters or {})}
    chosen = find(names, folder)
    described = machine.describe(given["device"])
    given["device"] = described["device"]
    work = [(notebook, notebook.parameters(given)) for notebook in chosen]
    if jobs < 1 or time_limit <= 0:
        raise CourseError(f"jobs must be at least 1 and the time limit above 0, not {jobs} and {time_limit}")
    out = pathlib.Path(out).resolve() if out else _new_folder()
    make_folder(out, "--out")
    ran_on, say = machine.line(described), functools.partial(print, flush=True)
    runs = [_prepare(notebook, values, out, ran_on, say) for notebook, values in work]
    interrupted = False
    try:
        supervise.execute(runs, jobs, time_limit, say)
    except KeyboardInterrupt:
        interrupted = True
    results = [run.result for run in runs]
    for result in results:
        try:
            result.records = read_records(out / "evidence" / result.name)
        except CourseError as error:
            if result.passed:  # one that was ended may leave half a record, and has its reason
                result.status, result.reason = Outcome.FAIL, f"its evidence cannot be read: {error}"
        if not result.html.is_file():
            result.html = None
    state_file.write(out / "results.json", json.dumps(to_json(results, described), indent=1, default=str) + "\n")
    cases = [outcomes.Case("notebooks", each.name, each.status, each.reason, each.seconds) for each in results]
    outcomes.write_junit(out / "junit.xml", cases, "GRPO Failure Lab")
    _report(results, out, ran_on)
    if interrupted:
        raise KeyboardInterrupt
    return results


def _prepare(
    notebook: Notebook, parameters: dict[str, Any], out: pathlib.Path, ran_on: str, say: Callable[[str], None]
) -> supervise.Run:
    """Clear away what an earlier run left in `out`, and write the order for the notebook's process."""
    name = notebook.name
    named = eras.named_by(notebook.path)
    records, logs, copy, html = out / "evidence" / name, out / "logs", out / f"{name}.ipynb", out / f"{name}.html"
    shutil.rmtree(records, ignore_errors=True)
    for path in (copy, html):
        path.unlink(missing_ok=True)
    for path in (records, logs):
        path.mkdir(parents=True, exist_ok=True)
    order = {
        "name": name,
        "notebook": str(notebook.path.resolve()),
        "copy": str(copy),
        "html": str(html),
        "parameters": parameters,
        "ran_on": f"{ran_on}; eras: {', '.join(named)}" if named else ran_on,
        "has_setup": any(worker.is_setup(cell.source) for cell in notebook.code),
    }
    (logs / f"{name}.json").write_text(json.dumps(order, indent=1))
    log = logs / f"{name}.log"
    result = Result(name=name, of=len(notebook.code), eras=named, parameters=parameters, copy=copy, html=html, log=log)
    environment = os.environ | eras.find(eras.TODAY, ready=False).variables
    environment |= {"FAILURELAB_EVIDENCE": str(records), "FAILURELAB_SOURCE": name}
    return supervise.Run(result, logs / f"{name}.json", environment, say)


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


def exit_status(results: Iterable[Result]) -> int:
    """Return 1 if any notebook failed; else 3 if the environment broke one, or if none passed at all; else 0."""
    return outcomes.exit_status(result.status for result in results)


def to_json(results: Sequence[Result], described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `results.json` holds: the results, and what they computed on, of `machine.describe`."""
    return {
        "schema": 1,
        "ran_on": dict(described),
        "summary": outcomes.summary(result.status for result in results),
        "exit_status": exit_status(results),
        "results": [dataclasses.asdict(result) for result in results],
    }


def _report(results: Sequence[Result], out: pathlib.Path, ran_on: str) -> None:
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
