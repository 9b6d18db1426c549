"""What a lab's folder holds, read and checked: `lab.toml`, the scripts, the hints, and the rules that all labs keep.

labs/NN_name/start.py   the whole script as a user has it: nothing in it marks the fault
             lab.toml   the symptom; what is measured, what a healthy run is, and why a script that is not one fails;
                        then, as edits of start.py, what people try and the solution, whose repair is marked: # ^^^ why
             hints.md   three hints, growing: where to look, what to measure, what to change
             run/       with `given = "run"`: the log, trainer_state.json and versions of a run of start.py
             train.py   the learner's copy of start.py: made at first use, and ignored by git

labs/retired.toml       labs that are no more: a number is never used again

An edit finds a text that is in start.py exactly once, and is one of three:

    ["old", "new"]                        the text is replaced
    { after = "text", add = "lines" }     lines are added below the line that holds it
    { drop = "text" }                     the line that holds it is left out
"""

import ast
import dataclasses
import difflib
import itertools
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from failurelab import failures as registry
from failurelab.errors import FailureLabError
from failurelab.failures import predicates
from failurelab.failures.predicates import Predicate
from failurelab.failures.toml_table import Table
from failurelab_course import eras
from failurelab_course.labs import metrics

_NAME = re.compile(r"(\d\d)_[a-z0-9_]+")
HINTS = 3
CHANGED = 12  # lines of code that a solution may change
# What a learner starts from, from the easiest to the hardest.
GIVEN = {
    "place": "the symptom, and the part of the script that it comes from",
    "symptom": "the symptom, and the script",
    "run": "what a run left behind, and the script",
    "nothing": "a script whose run looks healthy",
}
MEMORY_LIMIT = 4096  # MiB that a check may hold; the small model's training needs less than one GiB


class LabError(FailureLabError):
    """A lab is not known, or its files are not as they must be; the message names the file and the key."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change of a script.

    Attributes:
        kind: `replace`, `after` or `drop`; see the module's text.
        text: what is looked for.
        new: what replaces it, or the lines that are added.
    """

    kind: str
    text: str
    new: str = ""

    def apply(self, script: str) -> str:
        """Return the script with this change; the text must be in it."""
        start = script.index(self.text)
        end = start + len(self.text)
        if self.kind == "replace":
            return script[:start] + self.new + script[end:]
        end = script.index("\n", end) + 1
        if self.kind == "after":
            return f"{script[:end]}{self.new}\n{script[end:]}"
        return script[: script.rfind("\n", 0, start) + 1] + script[end:]


@dataclasses.dataclass(frozen=True)
class Script:
    """A script of a lab: its start script, with edits.

    Attributes:
        name: `start`, `solution`, or what a wrong fix is called.
        start: the file of the start script.
        edits: what is changed in it, in order.
    """

    name: str
    start: pathlib.Path
    edits: tuple[Edit, ...]

    def text(self) -> str:
        """Return its source.

        Raises:
            LabError: there is no start script, or an edit does not apply to it.
        """
        try:
            script = self.start.read_text(encoding="utf-8")
        except OSError as error:
            raise LabError(f"{self.start} cannot be read: {error.strerror}. Next: git checkout -- labs") from error
        for edit in self.edits:
            if (count := script.count(edit.text)) != 1:
                raise LabError(
                    f"{self.start.parent.name}/lab.toml: {self.name}: an edit looks for {edit.text!r}, which is in "
                    f"start.py {count} times and must be there once. Next: write the edit anew"
                )
            script = edit.apply(script)
        return script

    def write(self, folder: pathlib.Path) -> pathlib.Path:
        """Write it to `folder`, where it can be run; return its path."""
        text = self.text()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.py"
        path.write_text(text, encoding="utf-8")
        return path


@dataclasses.dataclass(frozen=True)
class Broken(Script):
    """A script that must fail, for this reason and with this signature."""

    reason: str
    signature: tuple[Predicate, ...]


@dataclasses.dataclass(frozen=True)
class Lab:
    """One lab: see the module's text for its folder, and the fields of `lab.toml`."""

    name: str
    folder: pathlib.Path
    id: str
    title: str
    symptom: str
    given: str
    facts: dict[str, str | int | float | bool]
    failures: tuple[str, ...]
    upstream: tuple[str, ...]
    era: str
    kind: str
    trainer: str
    needs: tuple[str, ...]
    measured: str
    healthy: tuple[Predicate, ...]
    notes: tuple[Predicate, ...]
    broken: Broken
    wrong_fixes: tuple[Broken, ...]
    solution: Script
    time_limit: float
    memory_limit: int
    difficulty: str
    minutes: int
    false_alarm: bool
    devices: tuple[str, ...]

    @property
    def number(self) -> str:
        """The two digits that its name starts with."""
        return self.name[:2]

    @property
    def start(self) -> pathlib.Path:
        """The script as it is at first: what is proved to be broken, and what a learner gets a copy of."""
        return self.folder / "start.py"

    @property
    def train(self) -> pathlib.Path:
        """The script that a learner edits; see `learner_script`."""
        return self.folder / "train.py"

    @property
    def hints(self) -> tuple[str, ...]:
        """The hints, from the first nudge to the last: each says more than the one before."""
        text = (self.folder / "hints.md").read_text(encoding="utf-8")
        return tuple(part.strip() for part in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:])


def known(folder: pathlib.Path | None = None) -> list[str]:
    """Return the names of all labs in order; `folder` is labs/ unless another is given."""
    folder = folder or eras.root() / "labs"
    return sorted(path.parent.name for path in folder.glob("*/lab.toml"))


def find(names: Iterable[str] | None = None, folder: pathlib.Path | None = None) -> list[Lab]:
    """Return the labs of these names or numbers (`1`, `01` or `01_frozen_embeddings`), all without names.

    Raises:
        LabError: an unknown name, or a lab that cannot be read.
    """
    folder = folder or eras.root() / "labs"
    there = known(folder)
    if names is None:
        return [load(folder / name) for name in there]
    chosen, gone = [], retired(folder)
    for asked in names:
        fits = [name for name in there if asked == name or (asked.isdigit() and int(asked) == int(name[:2]))]
        number = f"L{int(asked):02}" if asked.isdigit() else f"L{asked[:2]}"
        if not fits and number in gone:
            raise LabError(gone[number])
        if not fits:
            raise LabError(f"unknown lab {asked!r}. The labs are: {', '.join(there) or 'none'}")
        chosen += fits
    return [load(folder / name) for name in dict.fromkeys(chosen)]


def retired(folder: pathlib.Path | None = None) -> dict[str, str]:
    """Return the ids of labs that are no more, and of each why, and which lab to take instead.

    Raises:
        LabError: retired.toml cannot be read.
    """
    path = (folder or eras.root() / "labs") / "retired.toml"
    if not path.is_file():
        return {}
    raw = Table.read(path, LabError, path.name)
    entries = {}
    for id in list(raw.rest):
        entry = Table(path.name, raw.take(id, dict), LabError, f"{id}: ")
        entries[id] = f"lab {id[1:]} is retired: {entry.text('why')}. Next: lab {entry.text('instead')[1:]}"
        entry.done()
    return entries


def load(folder: pathlib.Path) -> Lab:
    """Read and check one lab's folder.

    Raises:
        LabError: a file is missing, or lab.toml is not as it must be.
    """
    path = folder / "lab.toml"
    where = f"{folder.name}/lab.toml"
    raw = Table.read(path, LabError, where)
    if not _NAME.fullmatch(folder.name):
        raise LabError(f"{folder.name}: a lab's folder is called NN_name, two digits and a name in small letters")
    kind = raw.take("kind", str, "trainer")
    lab = Lab(
        name=folder.name,
        folder=folder,
        id=raw.text("id"),
        title=raw.text("title"),
        symptom=raw.take("symptom", str, ""),
        given=raw.take("given", str, ""),
        facts=raw.take("facts", dict, {}),
        failures=raw.texts("failures", ()),
        upstream=raw.texts("upstream", ()),
        era=raw.text("era"),
        kind=kind,
        trainer=raw.text("trainer"),
        needs=raw.texts("needs"),
        measured=raw.text("measured"),
        healthy=_predicates(raw, "healthy"),
        notes=_predicates(raw, "notes", ()),
        broken=_broken(Table(where, raw.take("broken", dict), LabError, "broken: "), folder, "start"),
        wrong_fixes=tuple(_broken(table, folder) for table in raw.tables("wrong_fixes")),
        solution=_solution(Table(where, raw.take("solution", dict), LabError, "solution: "), folder),
        time_limit=float(raw.take("time_limit", int)),
        memory_limit=raw.take("memory_limit", int, MEMORY_LIMIT),
        difficulty=raw.text("difficulty"),
        minutes=raw.take("minutes", int),
        false_alarm=raw.take("false_alarm", bool, False),
        devices=_devices(raw, kind),
    )
    raw.done()
    if lab.id != f"L{lab.number}":
        raise LabError(f"{where}: id is {lab.id!r}, the folder says L{lab.number}; an id is never changed")
    if lab.id in retired(folder.parent):
        raise LabError(f"{where}: {lab.id} is retired, and a number is never used again. Next: take a new one")
    if not (lab.failures or lab.false_alarm or lab.upstream):
        raise LabError(
            f"{where}: failures: it is missing or empty; only a false alarm, or a lab with upstream, has none"
        )
    for id in lab.failures:
        try:
            registry.get(id)
        except registry.RegistryError as error:
            raise LabError(f"{where}: failures: {error}") from error
    _check_metrics(lab, where)
    return lab


def learner_script(lab: Lab) -> pathlib.Path:
    """Return the learner's train.py; where there is none yet, it is made of start.py.

    Raises:
        LabError: there is no start script.
    """
    if not lab.train.exists():
        copy_start(lab)
    return lab.train


def copy_start(lab: Lab) -> None:
    """Make train.py as start.py is, whole or not at all.

    Raises:
        LabError: there is no start script.
    """
    partial = lab.folder / f".train-{os.getpid()}-{threading.get_ident()}.partial"  # two commands may do this at once
    try:
        shutil.copyfile(lab.start, partial)
        partial.replace(lab.train)
    except FileNotFoundError as error:
        raise LabError(f"{lab.start} is missing. Next: git checkout -- labs") from error
    finally:
        partial.unlink(missing_ok=True)


def _broken(raw: Table, folder: pathlib.Path, name: str = "") -> Broken:
    edits = () if name else read_edits(raw)
    name = name or raw.text("name")
    script = Broken(name, folder / "start.py", edits, raw.text("reason"), _predicates(raw, "signature"))
    raw.done()
    return script


def _solution(raw: Table, folder: pathlib.Path) -> Script:
    script = Script("solution", folder / "start.py", read_edits(raw))
    raw.done()
    return script


def read_edits(raw: Table) -> tuple[Edit, ...]:
    """Read the edits of a script; see the module's text.

    Raises:
        LabError: one is of no known form.
    """
    edits = []
    for source in raw.take("edits", list):
        match source:
            case [str(text), str(new)]:
                edits.append(Edit("replace", text, new))
            case {"after": str(text), "add": str(new), **rest} if not rest:
                edits.append(Edit("after", text, new))
            case {"drop": str(text), **rest} if not rest:
                edits.append(Edit("drop", text))
            case _:
                raise raw.error("edits", f'{source!r} is none of ["old", "new"], {{after, add}} and {{drop}}')
    return tuple(edits)


def _predicates(raw: Table, key: str, default: tuple | None = None) -> tuple[Predicate, ...]:
    sources = raw.take(key, list, default)
    try:
        parsed = predicates.parse_all(sources)
    except predicates.PredicateError as error:
        raise raw.error(key, str(error)) from error
    if not parsed and default is None:
        raise raw.error(key, "it is empty")
    return parsed


def _devices(raw: Table, kind: str) -> tuple[str, ...]:
    """Read where a lab can be checked; by default wherever its kind is measured."""
    possible = metrics.DEVICES[:1] if kind in metrics.CPU_ONLY else metrics.DEVICES
    devices = raw.texts("devices", possible)
    for device in devices:
        if device not in metrics.DEVICES:
            raise raw.error("devices", f"{device!r} is none of {', '.join(metrics.DEVICES)}")
        if device not in possible:
            raise raw.error(
                "devices", f"{device!r}, and the kind {kind} runs on the CPU alone: {metrics.CPU_ONLY[kind]}"
            )
    if "cpu" not in devices:
        raise raw.error("devices", "the CPU is not among them, and every lab is proved there")
    return devices


def _check_metrics(lab: Lab, where: str) -> None:
    """Find metrics that the checker does not measure before a run does."""
    if lab.kind not in metrics.KINDS:
        raise LabError(f"{where}: kind: {lab.kind!r} is none of {', '.join(metrics.KINDS)}")
    measured = metrics.of(lab.kind)
    scripts = (lab.broken, *lab.wrong_fixes)
    for predicate in itertools.chain(lab.healthy, lab.notes, *(script.signature for script in scripts)):
        asked = {*predicate.names, *predicates.fields(predicate.when_holds), *predicates.fields(predicate.when_fails)}
        for name in sorted(asked - set(measured)):
            raise LabError(f"{where}: {predicate}: {name!r} is no figure. Measured are: {', '.join(measured)}")


def wrong_facts(lab: Lab, measured: Mapping[str, Any]) -> list[str]:
    """Return the facts of lab.toml that name a figure of the run and are not what the broken run measured."""
    return [
        f"{name} is {measured[name]}, lab.toml says {fact}"
        for name, fact in lab.facts.items()
        if name in measured and not metrics.agree(fact, measured[name])
    ]


def signature(lab: Lab) -> tuple[Predicate, ...]:
    """Return what the broken run must show: the lab's own signature, and of its failures' what this kind measures."""
    measured = set(metrics.of(lab.kind))
    if lab.false_alarm:
        return lab.broken.signature
    of_failures = (predicate for id in lab.failures for predicate in registry.get(id).signature)
    return (*lab.broken.signature, *(predicate for predicate in of_failures if measured.issuperset(predicate.names)))


def broken_rules(lab: Lab) -> list[str]:
    """Return what the lab's files do not keep of the rules for all labs; empty when all is well."""
    problems = [f"{path.name} is missing" for path in (lab.start, lab.folder / "hints.md") if not path.is_file()]
    if problems:
        return problems
    start, hints = lab.broken.text(), (lab.folder / "hints.md").read_text(encoding="utf-8")
    if "TODO" in start:
        problems.append("start.py holds a TODO: finding the place is what the lab trains")
    if lab.given not in GIVEN:
        problems.append(f"lab.toml: given is {lab.given!r}, and is one of {', '.join(GIVEN)}")
    told = ast.get_docstring(ast.parse(start)) or ""
    if not lab.symptom or " ".join(lab.symptom.split()) not in " ".join(told.split()):
        problems.append("the symptom of lab.toml is not in start.py's docstring: what does a colleague see?")
    if lab.given == "run" and not (lab.folder / "run" / "trainer_state.json").is_file():
        problems.append('given = "run", and run/trainer_state.json is not there')
    if not re.search(r"^if __name__ == .__main__.:", start, re.MULTILINE):
        problems.append("start.py does nothing when it is run by hand: it has no `if __name__ == '__main__':`")
    for number in sorted({*re.findall(r"\b[Ll]abs? (\d\d)\b", start + hints)} - {lab.number}):
        problems.append(f"start.py or hints.md speaks of lab {number}: that gives it away")
    for script in (*lab.wrong_fixes, lab.solution):
        try:
            script.text()
        except LabError as error:
            problems.append(str(error))
    if problems:
        return problems
    solution = lab.solution.text()
    if not re.search(r"^\s*# \^\^\^ \S", solution, re.MULTILINE):
        problems.append("the solution does not mark its repair with a line '# ^^^ why'")
    if (changed := changed_lines(lab)) > CHANGED:
        problems.append(f"the solution changes {changed} lines of code: {CHANGED} at most, or nobody sees the repair")
    if re.search(r"^\s*(from|import) failurelab\b", start, re.MULTILINE):
        problems.append("start.py imports failurelab: a lab is a script as users write it")
    if len(lab.hints) != HINTS or any(len(a) >= len(b) for a, b in zip(lab.hints, lab.hints[1:])):
        problems.append(f"hints.md must have {HINTS} hints under '## ' headings, each longer than the one before")
    if not lab.wrong_fixes:
        problems.append("no wrong fix is declared: what do people try first?")
    names = [fix.name for fix in lab.wrong_fixes]
    problems += [f"the wrong fix {name} is declared twice" for name in sorted({n for n in names if names.count(n) > 1})]
    return problems


def changed_lines(lab: Lab) -> int:
    """Return how many lines of code the solution adds, takes away or changes; comments and docstrings do not count."""
    old, new = (_code(script.text()) for script in (lab.broken, lab.solution))
    matches = difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in matches if kind != "equal")


def _code(source: str) -> list[str]:
    tree = ast.parse(source)
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()
