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
from collections.abc import Iterable, Mapping
from typing import Any

from failurelab.errors import FailureLabError
from failurelab_course import eras, junit
from failurelab_course.experiments import machine as ran_on
from failurelab_course.ledger import records as evidence
from failurelab_course.runs import lint as contract
from failurelab_course.runs import stored, supervise
from failurelab_course.runs import worker as runner
from failurelab_course.runs.results import Result, exit_status, report, summary, to_json

__all__ = [
    "CourseError",
    "DeviceError",
    "Notebook",
    "Result",
    "exit_status",
    "find",
    "known",
    "notebooks",
    "regenerate",
    "run",
    "summary",
]

DeviceError = ran_on.DeviceError


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

    @property
    def declared(self) -> dict[str, Any]:
        """The parameters that it declares, with their defaults."""
        try:
            cells = [cell for cell in self.code if "parameters" in stored.tags(cell)]
            return stored.declared_parameters(cells[0].source) if cells else {}
        except SyntaxError as error:
            raise CourseError(f"notebook {self.name}: its parameters cell is no Python: {error.msg}") from error

    def parameters(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to inject. A standard parameter at its default may be undeclared; any other must be declared.

        Raises:
            CourseError: a parameter is not declared, or its value has another type than the default.
        """
        declared, chosen = self.declared, {}
        for name, value in given.items():
            if name in declared:
                chosen[name] = self._typed(name, value, declared[name])
            elif name not in contract.DEFAULTS or value != contract.DEFAULTS[name]:
                raise CourseError(
                    f"notebook {self.name} has no parameter {name!r}; it declares {', '.join(declared) or 'none'}"
                )
        return chosen

    def _typed(self, name: str, value: Any, default: Any) -> Any:
        kind = type(default)
        if default is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        if kind is str and isinstance(value, int | float):
            return str(value)
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
    found = [Notebook(path) for path in sorted(folder.glob("[0-9]*.ipynb"))]
    if not found:
        raise CourseError(f"no notebook is in {folder}. Next: git checkout notebooks")
    return found


def known(folder: pathlib.Path | None = None) -> list[str]:
    """Return the names of all notebooks, in their order."""
    return [each.name for each in notebooks(folder)]


def find(names: Iterable[str] = (), folder: pathlib.Path | None = None) -> list[Notebook]:
    """Return the named notebooks, all without a name. `0`, `00`, `00_start_here`, `start_here` name the same one.

    Raises:
        CourseError: a name is unknown (the message lists the known ones), or two notebooks have it.
    """
    every = notebooks(folder)
    chosen: list[Notebook] = []
    for name in names:
        same = [each for each in every if str(name).removesuffix(".ipynb") in _aliases(each.name)]
        if len(same) != 1:
            many = f"{name!r} names {len(same)} notebooks" if same else f"unknown notebook {name!r}"
            raise CourseError(f"{many}: the notebooks are {', '.join(each.name for each in every)}")
        chosen += [each for each in same if each not in chosen]
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
    jobs: int = 2,
    out: pathlib.Path | None = None,
    time_limit: float = 600,
    progress: bool = True,
    folder: pathlib.Path | None = None,
) -> list[Result]:
    """Run notebooks, `jobs` at once, and return what became of each, in their order.

    Args:
        names: numbers or names; all when none is given.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; what it means here is given to every notebook.
        model: a name that `models.load` knows.
        parameters: further parameters; every notebook named must declare them.
        seed: the seed given to every notebook.
        jobs: how many run at the same time.
        out: where copies and evidence go; by default a new folder under `.course/runs`.
        time_limit: seconds that one notebook may take; over it, its kernel and all that this started are ended.
        progress: show a bar for each and a table at the end.
        folder: where the notebooks are, if not in the course.

    Raises:
        CourseError: an unknown name or parameter, or an impossible number; nothing was started.
        DeviceError: the device cannot be used here; nothing was started.
        KeyboardInterrupt: after all children were ended and what is known was written.
    """
    given = {"device": device, "model": _whole(model), "seed": seed, **(parameters or {})}
    chosen = find(names, folder)
    ran = ran_on.describe(given["device"])
    given["device"] = ran["device"]
    return _run([(each, each.parameters(given)) for each in chosen], jobs, out, time_limit, progress, ran=ran)


def _whole(model: str) -> str:
    """Return a folder's whole path, for notebooks run in their own folder; other names as they are."""
    folder = pathlib.Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() and model not in ("tiny", "random-0.5b") else model


def regenerate(
    names: Iterable[str] = (),
    *,
    jobs: int = 2,
    time_limit: float = 600,
    progress: bool = True,
    out: pathlib.Path | None = None,
    folder: pathlib.Path | None = None,
) -> list[Result]:
    """Run notebooks with their own defaults and store the outputs in the notebooks themselves.

    A notebook is written only if it passed, and if nobody changed it meanwhile. One that then breaks the notebook
    contract (a path in an output, say) is written all the same, so that its author sees it, and its result is FAIL.
    """
    chosen = find(names, folder)
    before = {each.name: each.path.read_bytes() for each in chosen}

    def store(result: Result, notebook: Notebook) -> None:
        if result.status != "PASS":
            return
        if notebook.path.read_bytes() != before[notebook.name]:
            result.status, result.reason = "FAIL", "it was changed while it ran, so it was not written; run it again"
            return
        made = stored.text(stored.normalise(stored.read(result.copy)))
        if made.encode() != before[notebook.name]:
            _write(notebook.path, made)
        if broken := contract.check(notebook.path):
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            result.status, result.reason = "FAIL", f"contract: {broken[0]}{more}"

    return _run([(each, {}) for each in chosen], jobs, out, time_limit, progress, store)


def _run(work, jobs, out, time_limit, progress, after=lambda result, notebook: None, ran=None) -> list[Result]:
    if jobs < 1 or time_limit <= 0:
        raise CourseError(f"jobs must be at least 1 and the time limit above 0, not {jobs} and {time_limit}")
    for notebook, _ in work:
        notebook.code  # noqa: B018 (an unreadable notebook is told before anything starts)
    out = pathlib.Path(out).resolve() if out else _new_folder()
    ran = ran or ran_on.describe()
    children = [_child(notebook, parameters, out, ran) for notebook, parameters in work]
    interrupted = False
    try:
        supervise.run(children, jobs, time_limit, show=progress)
    except KeyboardInterrupt:
        interrupted = True
    results = [_result(child, parameters) for child, (_, parameters) in zip(children, work)]
    for result, (notebook, _) in zip(results, work):
        after(result, notebook)
    _write(out / "results.json", json.dumps(to_json(results, ran), indent=1) + "\n")
    cases = [junit.Case("notebooks", each.name, each.status, each.reason, each.seconds) for each in results]
    junit.write(out / "junit.xml", cases, "GRPO Failure Lab")
    if progress:
        report(results, out, ran_on.line(ran))
    if interrupted:
        raise KeyboardInterrupt
    return results


def _child(notebook: Notebook, parameters: dict[str, Any], out: pathlib.Path, ran: dict[str, Any]) -> supervise.Child:
    name = notebook.name
    records = out / "evidence" / name
    shutil.rmtree(records, ignore_errors=True)
    for path in (out / f"{name}.ipynb", out / f"{name}.html"):
        path.unlink(missing_ok=True)
    for path in (records, out / "logs"):
        path.mkdir(parents=True, exist_ok=True)
    order = {
        "name": name,
        "notebook": str(notebook.path.resolve()),
        "folder": str(notebook.path.resolve().parent),
        "copy": str(out / f"{name}.ipynb"),
        "html": str(out / f"{name}.html"),
        "parameters": parameters,
        "ran_on": ran_on.line(ran),
        "has_setup": any(runner.is_setup(cell.source) for cell in notebook.code),
    }
    order_file = out / "logs" / f"{name}.json"
    order_file.write_text(json.dumps(order, indent=1))
    environment = dict(os.environ) | eras.find(eras.TODAY, ready=False).variables
    environment |= {"FAILURELAB_EVIDENCE": str(records), "FAILURELAB_SOURCE": name}
    return supervise.Child(name, order_file, out / "logs" / f"{name}.log", environment, len(notebook.code))


def _result(child: supervise.Child, parameters: dict[str, Any]) -> Result:
    order = json.loads(child.order.read_text())
    outcome = child.outcome or {"status": "NOT RUN", "reason": "interrupted" if child.started else "not started"}
    status, reason, records = outcome["status"], outcome["reason"], []
    try:
        records = evidence.collect(pathlib.Path(order["copy"]).parent / "evidence" / child.name)
    except evidence.EvidenceError as error:
        if status == "PASS":  # a run that was ended may leave half a line
            status, reason = "FAIL", f"its evidence cannot be read: {error}"
    html = pathlib.Path(order["html"])
    return Result(
        name=child.name,
        status=status,
        reason=reason,
        cells=outcome.get("done", child.done),
        of=child.cells,
        seconds=child.seconds,
        peak_bytes=outcome.get("peak_bytes"),
        parameters=parameters,
        copy=pathlib.Path(order["copy"]),
        html=html if html.is_file() else None,
        log=child.log,
        records=records,
    )


def _new_folder() -> pathlib.Path:
    """Make `.course/runs/<time>` and let `.course/runs/latest` lead to it."""
    top = eras.root() / ".course" / "runs"
    top.mkdir(parents=True, exist_ok=True)
    stamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while True:
        folder = top / (stamp if number == 1 else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
        number += 1
    link = top / f".latest.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(top / "latest")
    return folder


def _write(path: pathlib.Path, content: str) -> None:
    """Write a whole file or none of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)
