"""Labs: the failures as scripts to repair, each proved in three states.

The broken script must fail for the declared reason, every wrong fix must still fail, each for its own, and the solution
must heal: what was lost is back, as measured. A script that fails for another reason than declared proves nothing, and
is reported as such. `failurelab verify` prints the matrix.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from . import check_client, eras, junit, predicates
from .lab_files import Broken, Lab, LabError, broken_rules, find, known, load, signature

__all__ = [
    "Broken",
    "Lab",
    "LabError",
    "Row",
    "check",
    "check_all",
    "checker",
    "exit_status",
    "find",
    "known",
    "load",
    "records",
    "render",
    "summary",
    "to_json",
    "verify",
]
PASS, FAIL, ENVIRONMENT, NOT_RUN = "PASS", "FAIL", "ENVIRONMENT", "NOT RUN"
# Causes stand first in lab.toml; what follows from them need not all be said.
TOLD = 3
# Kinds whose script is asked for a trainer; `trainer` of the others names the function that is called.
_BUILDS_A_TRAINER = ("trainer", "engine", "logits", "launch")
FORM, BROKEN, WRONG_FIX, RIGHT_FIX, CHECK = "form", "broken", "wrong_fix", "right_fix", "check"


@dataclasses.dataclass
class Row:
    """What became of one script of a lab.

    Attributes:
        lab: the lab's name.
        state: `form` (the rules for all labs), `broken`, `wrong_fix`, `right_fix`, or `check` (a learner's script).
        script: the file's name in the lab's folder.
        result: PASS, FAIL, ENVIRONMENT or NOT RUN.
        reason: why, with the figures that were measured.
        figures: what was measured; empty where nothing was.
        seconds: wall-clock.
        output: the end of what the script printed.
        traceback: of an error in the script.
        record: the evidence record, where one was made.
    """

    lab: str
    state: str
    script: str
    result: str = NOT_RUN
    reason: str = ""
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    output: str = ""
    traceback: str = ""
    record: dict[str, Any] | None = None


@dataclasses.dataclass
class _Task:
    lab: Lab
    path: pathlib.Path
    row: Row
    declared: Broken | None = None
    time_limit: float = 0.0


def check(lab: Lab, script: pathlib.Path | None = None, *, time_limit: float | None = None) -> Row:
    """Run one script, by default the learner's train.py; say whether it is healed, or what is still wrong.

    Raises:
        LabError: the script is not there.
    """
    return check_all(lab, [script or lab.train], time_limit=time_limit)[0]


def check_all(
    lab: Lab, scripts: Iterable[pathlib.Path], *, jobs: int = 2, time_limit: float | None = None
) -> list[Row]:
    """Check several scripts as answers to one lab, for one import of its era; return a row for each."""
    tasks = []
    for path in map(pathlib.Path, scripts):
        if not path.is_file():
            raise LabError(f"{path} is not there, so it cannot be checked. Next: name the script, or reset the lab")
        tasks.append(_Task(lab, path, Row(lab.name, CHECK, path.name), time_limit=time_limit or lab.time_limit))
    _run(tasks, jobs=jobs, done=lambda row: None)
    return [task.row for task in tasks]


def verify(
    names: Iterable[str] | None = None,
    *,
    jobs: int | None = None,
    folder: pathlib.Path | None = None,
    done: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Prove labs in three states, and that they keep the rules; return the matrix, a row for each script.

    Args:
        names: names or numbers of labs; all without.
        jobs: how many checks at once, each with one thread; by default two, or one on a single core.
        folder: where the labs are, by default labs/ of the course.
        done: is called with each row when it is known.

    Raises:
        LabError: an unknown lab, or one whose lab.toml cannot be read.
    """
    tasks, matrix = [], []
    for lab in find(names, folder):
        problems = broken_rules(lab)
        form = Row(lab.name, FORM, "lab.toml", FAIL if problems else PASS, "; ".join(problems))
        matrix.append(form)
        done(form)
        scripts = [
            (BROKEN, lab.broken.path, dataclasses.replace(lab.broken, signature=signature(lab))),
            *((WRONG_FIX, each.path, each) for each in lab.wrong_fixes),
            (RIGHT_FIX, lab.solution, None),
        ]
        for state, path, declared in scripts:
            row = Row(lab.name, state, str(path.relative_to(lab.folder)))
            matrix.append(row)
            if path.is_file():
                tasks.append(_Task(lab, path, row, declared, lab.time_limit))
            else:
                row.reason = "the script is missing"
    _run(tasks, jobs or min(2, os.cpu_count() or 1), done)
    return matrix


def _run(tasks: Sequence[_Task], jobs: int, done: Callable[[Row], None]) -> None:
    """Run the tasks of each era in one server of it, and judge what they measured."""
    for era in dict.fromkeys(task.lab.era for task in tasks):
        here = [task for task in tasks if task.lab.era == era]
        waiting = dict(enumerate(here))
        try:
            _run_in_era(era, waiting, jobs, done)
        except check_client.EnvironmentBroken as error:
            for task in waiting.values():
                task.row.result, task.row.reason = ENVIRONMENT, str(error)
                done(task.row)


def _run_in_era(era: str, waiting: dict[int, _Task], jobs: int, done: Callable[[Row], None]) -> None:
    """Run the tasks in `waiting`, by number, and take each out when it is judged."""
    needs = sorted({need for task in waiting.values() for need in task.lab.needs})
    with check_client.start(era, needs, jobs) as server:
        _ask(server, waiting, done)


def _ask(server: check_client.Server, waiting: dict[int, _Task], done: Callable[[Row], None]) -> None:
    model = eras.root() / "models" / "tiny-qwen2"
    for number, task in list(waiting.items()):
        lab = task.lab
        missing = [f"{need}: {server.broken[need]}" for need in lab.needs if need in server.broken]
        if missing:
            task.row.result, task.row.reason = ENVIRONMENT, f"era {lab.era} does not import {'; '.join(missing)}"
            done(waiting.pop(number).row)
            continue
        server.check(
            number,
            task.path,
            model,
            lab.trainer,
            task.time_limit,
            _record_order(task),
            kind=lab.kind,
            memory_limit=lab.memory_limit,
        )
    while waiting:
        answer = server.answer(max(task.time_limit for task in waiting.values()) * 2 + 30)
        task = waiting.pop(answer["id"])
        _judge(task, answer)
        done(task.row)


@contextlib.contextmanager
def checker(lab: Lab) -> Iterator[Callable[[pathlib.Path], Row]]:
    """Give a function that checks a script, as often as wanted, for one import of the lab's era.

    Raises:
        EnvironmentBroken: the era cannot be started.
    """

    def check_once(script: pathlib.Path) -> Row:
        task = _Task(lab, script, Row(lab.name, CHECK, script.name), time_limit=lab.time_limit)
        _ask(server, {0: task}, done=lambda row: None)
        return task.row

    with check_client.start(lab.era, list(lab.needs), 1) as server:
        yield check_once


def _record_order(task: _Task) -> dict[str, str] | None:
    if task.row.state == CHECK:
        return None
    case = f"lab {task.lab.name}: {task.row.script}"
    source = f"labs/{task.lab.name}"
    return {"failure": next(iter(task.lab.failures), "ground"), "state": task.row.state, "case": case, "source": source}


def _judge(task: _Task, answer: dict[str, Any]) -> None:
    """Fill in the row: result and reason, from what was measured or how the run ended."""
    row, lab = task.row, task.lab
    row.seconds, row.output = answer["seconds"], answer["output"]
    if "environment" in answer:
        row.result, row.reason = ENVIRONMENT, answer["environment"]
        return
    if "measured" not in answer:
        row.result, row.reason = FAIL, f"{row.script}: {answer['ended']}"
        return
    measured = answer["measured"]
    row.figures, row.traceback, row.record = measured["figures"], measured["traceback"], measured["record"]
    if measured["environment"]:
        row.result, row.reason = ENVIRONMENT, measured["environment"]
        return
    wrong = _wrong(lab, row.figures, measured["refused"])
    if task.declared is None:
        row.result = FAIL if wrong else PASS
        row.reason = wrong or "; ".join(each.told(row.figures) for each in lab.healthy if each.when_holds)
    else:
        row.result, row.reason = _judge_declared(task.declared, row, wrong, measured["refused"])


def _wrong(lab: Lab, figures: dict[str, Any], refused: str) -> str:
    """Return what is wrong with a run, led by what seems right and is no repair; empty if it is healed."""
    if refused:
        return refused
    if figures["error"]:
        where = {
            "import": "importing the script",
            "build": "build_trainer" if lab.kind in _BUILDS_A_TRAINER else lab.trainer,
            "train": "training",
            "measure": "measuring",
        }
        return f"{where[figures['error_stage']]} raised {figures['error']}"
    unmet = predicates.failing(lab.healthy, figures)
    if not unmet:
        return ""
    seems_right = [note.told(figures) for note in lab.notes if note.holds(figures)]
    wrong = "; ".join(each.told(figures) for each in unmet[:TOLD])
    return f"{' and '.join(seems_right)}, but {wrong}" if seems_right else wrong


def _judge_declared(declared: Broken, row: Row, wrong: str, refused: str) -> tuple[str, str]:
    """Judge a script that must fail for its declared reason."""
    if not wrong:
        solved = "it is already solved" if row.state == BROKEN else "this fix heals, it is no wrong one"
        return FAIL, f"{row.script}: {solved}: every healthy figure holds"
    about_error = any(predicate.figure == "error" for predicate in declared.signature)
    unmet = [] if refused else predicates.failing(declared.signature, row.figures)
    if refused or unmet or (row.figures["error"] and not about_error):
        not_so = ", ".join(f"{each} ({predicates.shown(row.figures[each.figure])})" for each in unmet)
        return FAIL, f"fails for another reason than declared: {wrong}. Declared, and not so: {not_so or 'no error'}"
    return PASS, f"fails as declared: {wrong}. {declared.reason}"


def exit_status(matrix: Iterable[Row]) -> int:
    """Return 1 if a row failed; else 3 if the environment broke one, or if none passed at all; else 0."""
    results = [row.result for row in matrix]
    if FAIL in results:
        return 1
    return 3 if ENVIRONMENT in results or PASS not in results else 0


def summary(matrix: Iterable[Row]) -> str:
    """Return one line with its denominators: `3 labs: 12 of 14 PASS, 1 FAIL, 1 NOT RUN`."""
    matrix = list(matrix)
    counts = {result: sum(row.result == result for row in matrix) for result in (PASS, FAIL, ENVIRONMENT, NOT_RUN)}
    others = "".join(f", {count} {result}" for result, count in counts.items() if count and result != PASS)
    return f"{len({row.lab for row in matrix})} labs: {counts[PASS]} of {len(matrix)} PASS{others}"


def to_json(matrix: Iterable[Row]) -> dict[str, Any]:
    """Return the matrix as JSON can hold it."""
    matrix = list(matrix)
    return {
        "schema": 1,
        "summary": summary(matrix),
        "exit_status": exit_status(matrix),
        "rows": [{key: _plain(value) for key, value in dataclasses.asdict(row).items()} for row in matrix],
    }


def _plain(value: Any) -> Any:
    """Return a figure as strict JSON holds it: NaN and infinities as text."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, float) and value - value != 0 else value


def cases(matrix: Iterable[Row]) -> list[junit.Case]:
    """Return the matrix as test cases for a CI system, a suite for each lab."""
    return [
        junit.Case(row.lab, f"{row.state}: {row.script}", row.result, row.reason, row.seconds, row.output)
        for row in matrix
    ]


def records(matrix: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the evidence records of a matrix."""
    return [row.record for row in matrix if row.record is not None]


def render(matrix: Iterable[Row]) -> Any:
    """Return the matrix for a terminal: the table, then what was measured in each run, then the denominators."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    matrix = list(matrix)
    styles = {PASS: "green", FAIL: "bold red", ENVIRONMENT: "yellow", NOT_RUN: "cyan"}
    words = {FORM: "form", BROKEN: "broken", WRONG_FIX: "wrong fix", RIGHT_FIX: "right fix", CHECK: "check"}
    table = Table("state", "script", "result", "seconds")
    told = []
    for name in dict.fromkeys(row.lab for row in matrix):
        table.add_section()
        table.add_row("", Text(name, "bold"))
        for row in (each for each in matrix if each.lab == name):
            script = row.script.removeprefix("wrong_fixes/")
            seconds = f"{row.seconds:.0f}" if row.seconds else "-"
            table.add_row(words[row.state], script, Text(row.result, styles[row.result]), seconds)
            if row.reason:
                told.append(Text.assemble((f"{name[:2]} {script} ", "bold"), row.reason))
    return Group(table, *told, Text(summary(matrix), "bold"))
