"""Labs: the failures as scripts to repair, each proved in three states.

The broken script must fail for the declared reason, every wrong fix must still fail, each for its own, and the solution
must heal: what was lost is back, as measured. A script that fails for another reason than declared proves nothing, and
is reported as such. `failurelab verify` prints the matrix.

Training is nearly all of the time. What some wrong fixes are declared to show is decided by the first steps
(gradients, rollouts, rows of logits) or by none (placement): these are stopped there, and decided by such figures
alone. Broken scripts and solutions are trained to their end.
"""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from failurelab import failures as registry
from failurelab.failures import predicates, verdicts
from failurelab.failures.loader import Mechanism
from failurelab_course import eras, outcomes
from failurelab_course.experiments import machine
from failurelab_course.labs import metrics
from failurelab_course.labs.checker import client as check_client
from failurelab_course.labs.definition import Broken, Lab, LabError, find, learner_script, wrong_facts
from failurelab_course.labs.definition import known as known
from failurelab_course.labs.definition import load as load

PASS, FAIL, ENVIRONMENT, NOT_RUN = outcomes.Outcome
# Checks at once, each with one thread.
JOBS = min(2, os.cpu_count() or 1)
# Causes stand first in lab.toml; what follows from them need not all be said.
TOLD = 3
# Kinds whose script is asked for a trainer; `trainer` of the others names the function that is called.
_BUILDS_A_TRAINER = ("trainer", "zero3", "logits", "launch")
BROKEN, WRONG_FIX, RIGHT_FIX, CHECK = "broken", "wrong_fix", "right_fix", "check"


@dataclasses.dataclass
class ScriptOutcome:
    """What became of one script of a lab.

    `state` is `broken`, `wrong_fix`, `right_fix`, or `check` (a learner's script); `script` is `start`, `solution`, a
    wrong fix's name, or a learner's file; `metrics` is empty where nothing was measured; `seconds` are wall-clock;
    `output` is the end of what the script printed; `device` is `cpu`, `cuda` or `cuda:N`.
    """

    lab: str
    state: str
    script: str
    result: str = NOT_RUN
    reason: str = ""
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    output: str = ""
    traceback: str = ""
    device: str = "cpu"


@dataclasses.dataclass
class _Task:
    lab: Lab
    path: pathlib.Path
    row: ScriptOutcome
    declared: Broken | None = None

    @property
    def is_early(self) -> bool:
        """Whether what is declared shows in the first steps, so that the others prove nothing more."""
        if self.row.state != WRONG_FIX or self.lab.kind not in metrics.CAN_STOP:
            return False
        return metrics.EARLY.issuperset(name for predicate in self.declared.signature for name in predicate.names)


def resolved(device: str, lab: Lab) -> str:
    """Return `cpu`, `cuda` or `cuda:N`; of `auto` what is best for the lab: the GPU, if one works and the lab uses it.

    Raises:
        TierError: no such device, or a GPU is asked for and none works.
    """
    if device == "cpu" or (device == "auto" and lab.devices == ("cpu",)):
        return "cpu"
    return machine.describe(device)["device"]


def check(lab: Lab, script: pathlib.Path | None = None, *, device: str = "cpu") -> ScriptOutcome:
    """Run one script, by default the learner's train.py; say whether it is healed, or what is still wrong.

    Raises:
        LabError: the script is not there.
    """
    return check_all(lab, [script or learner_script(lab)], device=device)[0]


def check_all(lab: Lab, scripts: Iterable[pathlib.Path], *, device: str = "cpu") -> list[ScriptOutcome]:
    """Check several scripts as answers to one lab, for one import of its era; return a row for each."""
    return check_each([(lab, script) for script in scripts], device=device)


def check_each(answers: Iterable[tuple[Lab, pathlib.Path]], *, device: str = "cpu") -> list[ScriptOutcome]:
    """Check scripts, each as an answer to its lab, for one import of each era; return a row for each."""
    tasks = []
    for lab, path in answers:
        if not path.is_file():
            raise LabError(f"{path} is not there, so it cannot be checked. Next: name the script, or reset the lab")
        tasks.append(_Task(lab, path, ScriptOutcome(lab.name, CHECK, path.name, device=device)))
    _run(tasks, done=lambda row: None)
    return [task.row for task in tasks]


def verify(
    names: Iterable[str] | None = None,
    *,
    folder: pathlib.Path | None = None,
    done: Callable[[ScriptOutcome], None] = lambda row: None,
    device: str = "cpu",
) -> list[ScriptOutcome]:
    """Prove labs in three states; return the matrix, a row for each script.

    Args:
        names: names or numbers of labs; all without.
        folder: where the labs are, by default labs/ of the course.
        done: is called with each row when it is known.
        device: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU where there is one, for the labs that use one. A lab that does
            not use the device named is NOT RUN.

    Raises:
        LabError: an unknown lab, or one whose lab.toml cannot be read.
        TierError: the device cannot be used.
    """
    tasks, matrix = [], []
    labs = [(lab, resolved(device, lab)) for lab in find(names, folder)]
    with tempfile.TemporaryDirectory(prefix="failurelab-verify-") as scripts:
        for lab, here in labs:
            for state, script, declared in (
                (BROKEN, lab.broken, lab.broken),
                *((WRONG_FIX, fix, fix) for fix in lab.wrong_fixes),
                (RIGHT_FIX, lab.solution, None),
            ):
                row = ScriptOutcome(lab.name, state, script.name, device=here)
                matrix.append(row)
                try:
                    path = script.write(pathlib.Path(scripts, lab.name))
                except LabError as error:
                    row.result, row.reason = FAIL, str(error)
                    done(row)
                    continue
                tasks.append(_Task(lab, path, row, declared))
        _run(tasks, done)
    return matrix


def _run(tasks: Sequence[_Task], done: Callable[[ScriptOutcome], None]) -> None:
    """Run the tasks of each era and device in one server of it, and decide by what they measured."""
    groups: dict[tuple[str, str], list[_Task]] = {}
    for task in tasks:
        if reason := cannot_run(task.lab, task.row.device):
            task.row.reason = reason
            done(task.row)
        else:
            groups.setdefault((task.lab.era, task.row.device), []).append(task)
    for (era, device), here in groups.items():
        waiting = dict(enumerate(here))
        needs = sorted({need for task in here for need in task.lab.needs})
        try:
            with check_client.start(era, needs, JOBS, device=device) as server:
                _ask(server, waiting, done)
        except check_client.EnvironmentBroken as error:
            for task in waiting.values():
                task.row.result, task.row.reason = ENVIRONMENT, str(error)
                done(task.row)


def cannot_run(lab: Lab, device: str) -> str:
    """Return why a lab is NOT RUN on a device, or an empty text."""
    if device.partition(":")[0] in lab.devices:
        return ""
    return f"lab {lab.number} is checked on the CPU alone: {metrics.CPU_ONLY[lab.kind]}. Next: --device cpu, or auto"


def _ask(server: check_client.Server, waiting: dict[int, _Task], done: Callable[[ScriptOutcome], None]) -> None:
    """Run the tasks in `waiting`, by number, and take each out when it is decided.

    Raises:
        EnvironmentBroken: the server ended, or did not answer.
    """
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
            lab.time_limit,
            kind=lab.kind,
            memory_limit=lab.memory_limit,
            facts=lab.facts,
            stop_after=metrics.EARLY_STEPS if task.is_early else 0,
        )
    while waiting:
        answer = server.answer(server.longest(max(task.lab.time_limit for task in waiting.values())))
        task = waiting.pop(answer["id"])
        _decide(task, answer)
        done(task.row)


def _decide(task: _Task, answer: dict[str, Any]) -> None:
    """Fill in the row: result and reason, from what was measured or how the run ended."""
    row, lab = task.row, task.lab
    row.seconds, row.output = answer["seconds"], answer["output"]
    measured = answer.get("measured", {})
    row.metrics, row.traceback = measured.get("metrics", {}), measured.get("traceback", "")
    if environment := answer.get("environment") or measured.get("environment"):
        row.result, row.reason = ENVIRONMENT, environment
        return
    if not measured:
        row.result, row.reason = FAIL, f"{row.script}: {answer['ended']}"
        return
    if task.is_early:  # what a whole run alone can show was not asked for
        rules = {"healthy": lab.healthy, "notes": lab.notes}
        early = {key: tuple(one for one in rules[key] if metrics.EARLY.issuperset(one.names)) for key in rules}
        lab = lab.model_copy(update=early)
    wrong = _wrong(lab, row.metrics, measured["refused"])
    if task.declared is None:
        said = [predicate.describe(row.metrics) for predicate in lab.healthy if predicate.when_holds]
        row.result, row.reason = (FAIL, wrong) if wrong else (PASS, "; ".join(said))
    else:
        row.result, row.reason = _decide_declared(task.declared, row, wrong, measured["refused"])
        if row.state == BROKEN and row.result == PASS and (not_so := wrong_facts(lab, row.metrics)):
            row.result, row.reason = FAIL, f"facts of lab.toml are not so: {'; '.join(not_so)}"
    if row.result == PASS and (not_so := _against_registry(task.lab, row)):
        row.result, row.reason = FAIL, f"the registry's verdict is not so: {'; '.join(not_so)}"


def _against_registry(lab: Lab, row: ScriptOutcome) -> list[str]:
    """Return which failures of a broken script the registry does not find, and which it finds in a healed one."""
    told = []
    for id in () if lab.false_alarm else lab.failures:
        failure = registry.get(id)
        measured = any(set(row.metrics).issuperset(_found_by(each)) for each in failure.mechanisms)
        judgement = verdicts.judge(failure, [row.metrics])
        is_found = judgement.verdict == verdicts.FOUND
        if row.state == BROKEN and measured and not is_found:
            told.append(f"{id} is not found in the broken run")
        elif row.state in (RIGHT_FIX, CHECK) and is_found:
            told.append(f"{id} is found in the healed run: {judgement.says}")
    return told


def _found_by(mechanism: Mechanism) -> set[str]:
    return {name for predicate in mechanism.found for name in predicate.names}


def _wrong(lab: Lab, metrics: dict[str, Any], refused: str) -> str:
    """Return what is wrong with a run, led by what seems right and is no repair; empty if it is healed."""
    if refused:
        return refused
    if metrics["error"]:
        where = {
            "import": "importing the script",
            "build": "build_trainer" if lab.kind in _BUILDS_A_TRAINER else lab.trainer,
            "train": "training",
            "measure": "measuring",
        }
        return f"{where[metrics['error_stage']]} raised {metrics['error']}"
    unmet = predicates.failing(lab.healthy, metrics)
    if not unmet:
        return ""
    seems_right = [note.describe(metrics) for note in lab.notes if note.holds(metrics)]
    wrong = "; ".join(predicate.describe(metrics) for predicate in unmet[:TOLD])
    return f"{' and '.join(seems_right)}, but {wrong}" if seems_right else wrong


def _decide_declared(declared: Broken, row: ScriptOutcome, wrong: str, refused: str) -> tuple[str, str]:
    """Decide on a script that must fail for its declared reason."""
    if not wrong:
        solved = "it is already solved" if row.state == BROKEN else "this fix heals, it is no wrong one"
        return FAIL, f"{row.script}: {solved}: every healthy figure holds"
    about_error = any(predicate.figure == "error" for predicate in declared.signature)
    unmet = [] if refused else predicates.failing(declared.signature, row.metrics)
    if refused or unmet or (row.metrics["error"] and not about_error):
        not_so = ", ".join(f"{predicate} ({predicates.shown(row.metrics[predicate.figure])})" for predicate in unmet)
        return FAIL, f"fails for another reason than declared: {wrong}. Declared, and not so: {not_so or 'no error'}"
    return PASS, f"fails as declared: {wrong}. {declared.reason}"


def summary(matrix: Iterable[ScriptOutcome]) -> str:
    """Return one line with its denominators: `3 labs: 12 of 14 PASS, 1 FAIL, 1 NOT RUN`."""
    matrix = list(matrix)
    ran_on = {row.device.partition(":")[0] for row in matrix if row.result != NOT_RUN}
    where = "" if ran_on <= {"cpu"} else f", on {' and '.join(sorted(ran_on))}"
    return f"{len({row.lab for row in matrix})} labs: {outcomes.summary(row.result for row in matrix)}{where}"


def to_json(matrix: Iterable[ScriptOutcome]) -> dict[str, Any]:
    """Return the matrix as JSON can hold it."""
    matrix = list(matrix)
    return {
        "schema": 1,
        "summary": summary(matrix),
        "exit_status": outcomes.exit_status(row.result for row in matrix),
        "rows": [
            # what was measured is called figures there, as in the files under evidence/
            {"figures" if key == "metrics" else key: _as_json(value) for key, value in dataclasses.asdict(row).items()}
            for row in matrix
        ],
    }


def _as_json(value: Any) -> Any:
    """Return a figure as strict JSON holds it: NaN and infinities as text."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and value - value != 0 else value


def cases(matrix: Iterable[ScriptOutcome]) -> list[outcomes.Case]:
    """Return the matrix as test cases for a CI system, a suite for each lab."""
    return [
        outcomes.Case(row.lab, f"{row.state}: {row.script}", row.result, row.reason, row.seconds, row.output)
        for row in matrix
    ]


def render(matrix: Iterable[ScriptOutcome]) -> Any:
    """Return the matrix for a terminal: the table, then what was measured in each run, then the denominators."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    matrix = list(matrix)
    table = Table("state", "script", "result", "seconds")
    reasons = []
    for name in dict.fromkeys(row.lab for row in matrix):
        table.add_section()
        table.add_row("", Text(name, "bold"))
        for row in (row for row in matrix if row.lab == name):
            seconds = f"{row.seconds:.0f}" if row.seconds else "-"
            result = Text(row.result, outcomes.STYLES[row.result])
            table.add_row(row.state.replace("_", " "), row.script, result, seconds)
            if row.reason:
                reasons.append(Text.assemble((f"{name[:2]} {row.script} ", "bold"), row.reason))
    return Group(table, *reasons, Text(summary(matrix), "bold"))
