"""What a lab's folder holds, read and checked: `lab.toml`, and the scripts.

labs/NN_name/start.py   the whole script as a user has it: nothing in it marks the fault
             lab.toml   the symptom; what is measured, what a healthy run is, and why a script that is not one fails;
                        three hints, growing: where to look, what to measure, what to change; then, as edits of
                        start.py, what people try and the solution, whose repair is marked: # ^^^ why
             run/       with `given = "run"`: the log, trainer_state.json and versions of a run of start.py
             train.py   the learner's copy of start.py: made at first use, and ignored by git

labs/retired.toml       labs that are no more: a number is never used again

An edit finds a text that is in start.py exactly once, and is one of three:

    ["old", "new"]                        the text is replaced
    { after = "text", add = "lines" }     lines are added below the line that holds it
    { drop = "text" }                     the line that holds it is left out
"""

import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import pydantic
import tomllib

from failurelab import failures as registry
from failurelab.errors import FailureLabError
from failurelab.failures import predicates
from failurelab.failures.toml_table import read_toml
from failurelab_course import eras, state_file
from failurelab_course.labs import metrics

_NAME = re.compile(r"(\d\d)_[a-z0-9_]+")
# What a learner starts from, from the easiest to the hardest.
GIVEN = {
    "place": "the symptom, and the part of the script that it comes from",
    "symptom": "the symptom, and the script",
    "run": "what a run left behind, and the script",
    "nothing": "a script whose run looks healthy",
}


class LabError(FailureLabError):
    """A lab is not known, or its files are not as they must be; the message names the file and the key."""


class _Checked(pydantic.BaseModel):
    """A table of a TOML file: a key that is missing, of another type or unknown is an error that names it."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class LabEdit(_Checked):
    """One change of a script; `kind` is `replace`, `after` or `drop`, see the module's text."""

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


def _read_edit(source: Any) -> LabEdit:
    match source:
        case [str(text), str(new)]:
            return LabEdit(kind="replace", text=text, new=new)
        case {"after": str(text), "add": str(new), **rest} if not rest:
            return LabEdit(kind="after", text=text, new=new)
        case {"drop": str(text), **rest} if not rest:
            return LabEdit(kind="drop", text=text)
    raise ValueError(f'{source!r} is none of ["old", "new"], {{after, add}} and {{drop}}')


_Text = Annotated[str, pydantic.StringConstraints(pattern=r"\S")]
_Edits = tuple[Annotated[LabEdit, pydantic.PlainValidator(_read_edit)], ...]
_Predicates = tuple[Annotated[predicates.Predicate, pydantic.PlainValidator(predicates.parse)], ...]
_SomePredicates = Annotated[_Predicates, pydantic.Field(min_length=1)]


class Script(_Checked):
    """A script of a lab: its start script, with edits, in order."""

    start: pathlib.Path
    name: str = "solution"
    edits: _Edits

    def text(self) -> str:
        """Return its source.

        Raises:
            LabError: there is no start script, or an edit does not apply to it.
        """
        script = read_start(self.start)
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


class Broken(Script):
    """A script that must fail, for this reason and with this signature: as it is at first."""

    name: str = "start"
    edits: _Edits = ()
    reason: _Text
    signature: _SomePredicates


class WrongFix(Broken):
    """A script that must still fail: with a repair that people try."""

    name: _Text
    edits: _Edits


class Lab(_Checked):
    """One lab: see the module's text for its folder, and the fields of `lab.toml`."""

    folder: pathlib.Path
    title: _Text
    symptom: str = ""
    given: Literal[tuple(GIVEN)]
    facts: dict[str, str | int | float | bool] = {}
    failures: tuple[_Text, ...] = ()
    era: _Text
    kind: Literal[metrics.KINDS] = "trainer"
    trainer: _Text
    needs: tuple[_Text, ...]
    measured: _Text
    healthy: _SomePredicates
    notes: _Predicates = ()
    hints: tuple[_Text, _Text, _Text]
    broken: Broken
    wrong_fixes: tuple[WrongFix, ...] = ()
    solution: Script
    time_limit: float
    memory_limit: int = 4096  # MiB that a check may hold; the small model's training needs less than one GiB
    difficulty: _Text
    minutes: int
    false_alarm: bool = False

    @property
    def name(self) -> str:
        """Its folder's name, such as `01_frozen_embeddings`."""
        return self.folder.name

    @property
    def number(self) -> str:
        """The two digits that its name starts with."""
        return self.name[:2]

    @property
    def devices(self) -> tuple[str, ...]:
        """Where it can be checked: wherever its kind is measured."""
        return metrics.DEVICES[:1] if self.kind in metrics.CPU_ONLY else metrics.DEVICES

    @property
    def start(self) -> pathlib.Path:
        """The script as it is at first: what is proved to be broken, and what a learner gets a copy of."""
        return self.folder / "start.py"

    @property
    def train(self) -> pathlib.Path:
        """The script that a learner edits; see `learner_script`."""
        return self.folder / "train.py"


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
    entries = _read(path, path.name) if path.is_file() else {}
    return {
        id: f"lab {id[1:]} is retired: {entry['why']}. Next: lab {entry['instead'][1:]}"
        for id, entry in entries.items()
    }


def load(folder: pathlib.Path) -> Lab:
    """Read and check one lab's folder.

    Raises:
        LabError: a file is missing, or lab.toml is not as it must be.
    """
    where = f"{folder.name}/lab.toml"
    raw = _read(folder / "lab.toml", where)
    if not _NAME.fullmatch(folder.name):
        raise LabError(f"{folder.name}: a lab's folder is called NN_name, two digits and a name in small letters")
    for script in (raw.get("broken"), raw.get("solution"), *raw.get("wrong_fixes", ())):
        if isinstance(script, dict):
            script["start"] = folder / "start.py"
    try:
        lab = Lab(folder=folder, **raw)
    except pydantic.ValidationError as errors:
        first = errors.errors()[0]
        key = " ".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
        raise LabError(f"{where}: {key}: {first['msg']}") from errors
    if f"L{lab.number}" in retired(folder.parent):
        raise LabError(f"{where}: number {lab.number} is retired, and is never used again. Next: take a new one")
    if not (lab.failures or lab.false_alarm):
        raise LabError(f"{where}: failures: it is missing or empty; only a false alarm has none")
    for id in lab.failures:
        try:
            registry.get(id)
        except registry.RegistryError as error:
            raise LabError(f"{where}: failures: {error}") from error
    _check_metrics(lab, where)
    return lab


def _read(path: pathlib.Path, name: str) -> dict[str, Any]:
    try:
        return read_toml(path)
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise LabError(f"{name} is no TOML: {error}") from error


def read_start(path: pathlib.Path) -> str:
    """Return a lab's start script.

    Raises:
        LabError: it is not there.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}. Next: git checkout -- labs") from error


def learner_script(lab: Lab) -> pathlib.Path:
    """Return the learner's train.py; where there is none yet, it is made as by `copy_start`."""
    if not lab.train.exists():
        copy_start(lab)
    return lab.train


def copy_start(lab: Lab) -> None:
    """Make train.py as start.py is, whole or not at all.

    Raises:
        LabError: there is no start script.
    """
    state_file.write(lab.train, read_start(lab.start))


def _check_metrics(lab: Lab, where: str) -> None:
    """Find metrics that the checker does not measure before a run does."""
    measured = metrics.of(lab.kind)
    signatures = (script.signature for script in (lab.broken, *lab.wrong_fixes))
    for predicate in (*lab.healthy, *lab.notes, *(predicate for one in signatures for predicate in one)):
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
