"""What a lab's folder holds, read and checked: `lab.toml`, the scripts, the hints, and the rules that all labs keep.

labs/NN_name/lab.toml      what is measured, what a healthy run is, and why each script that is not one fails
             train.py      broken, with exactly one TODO; the learner's to edit
             broken.py     the same, as it was at first
             hints.md      three hints, growing
             solution.py   the same with the TODO done and the repair marked: # ^^^ why
             wrong_fixes/  what people try, one script each
"""

import ast
import dataclasses
import difflib
import pathlib
import re
from collections.abc import Iterable

from failurelab import failures as registry
from failurelab.errors import FailureLabError
from failurelab.failures import predicates
from failurelab.failures.predicates import Predicate
from failurelab.failures.toml_table import Table
from failurelab_course import eras
from failurelab_course.labs import metrics as figures

_NAME = re.compile(r"(\d\d)_[a-z0-9_]+")
HINTS = 3
CHANGED = 12  # lines of code that a solution may change
MEMORY_LIMIT = 4096  # MiB that a check may hold; the small model's training needs less than one GiB


class LabError(FailureLabError):
    """A lab is not known, or its files are not as they must be; the message names the file and the key."""


@dataclasses.dataclass(frozen=True)
class Broken:
    """A script that must fail, for this reason and with this signature."""

    path: pathlib.Path
    reason: str
    signature: tuple[Predicate, ...]


@dataclasses.dataclass(frozen=True)
class Lab:
    """One lab: see the module's text for its folder, and the fields of `lab.toml`."""

    name: str
    folder: pathlib.Path
    id: str
    title: str
    failures: tuple[str, ...]
    era: str
    kind: str
    trainer: str
    needs: tuple[str, ...]
    measured: str
    healthy: tuple[Predicate, ...]
    notes: tuple[Predicate, ...]
    broken: Broken
    wrong_fixes: tuple[Broken, ...]
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
    def train(self) -> pathlib.Path:
        """The script that a learner edits."""
        return self.folder / "train.py"

    @property
    def original(self) -> pathlib.Path:
        """The script as it was at first: what is proved to be broken, and what `reset` copies back."""
        return self.broken.path

    @property
    def solution(self) -> pathlib.Path:
        """The script that heals."""
        return self.folder / "solution.py"

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
    found = []
    for asked in names:
        fits = [name for name in there if asked == name or (asked.isdigit() and int(asked) == int(name[:2]))]
        if not fits:
            raise LabError(f"unknown lab {asked!r}. The labs are: {', '.join(there) or 'none'}")
        found += fits
    return [load(folder / name) for name in dict.fromkeys(found)]


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
    made = Lab(
        name=folder.name,
        folder=folder,
        id=raw.text("id"),
        title=raw.text("title"),
        failures=raw.texts("failures", ()),
        era=raw.text("era"),
        kind=kind,
        trainer=raw.text("trainer"),
        needs=raw.texts("needs"),
        measured=raw.text("measured"),
        healthy=_predicates(raw, "healthy"),
        notes=_predicates(raw, "notes", ()),
        broken=_broken(Table(where, raw.take("broken", dict), LabError, "broken: "), folder, "broken.py"),
        wrong_fixes=tuple(_broken(table, folder) for table in raw.tables("wrong_fixes")),
        time_limit=float(raw.take("time_limit", int)),
        memory_limit=raw.take("memory_limit", int, MEMORY_LIMIT),
        difficulty=raw.text("difficulty"),
        minutes=raw.take("minutes", int),
        false_alarm=raw.take("false_alarm", bool, False),
        devices=_devices(raw, kind),
    )
    raw.done()
    if made.id != f"L{made.number}":
        raise LabError(f"{where}: id is {made.id!r}, the folder says L{made.number}; an id is never changed")
    if not made.failures and not made.false_alarm:
        raise LabError(f"{where}: failures: it is missing or empty; only a false alarm has none")
    for id in made.failures:
        try:
            registry.get(id)
        except registry.RegistryError as error:
            raise LabError(f"{where}: failures: {error}") from error
    _check_figures(made, where)
    return made


def _broken(raw: Table, folder: pathlib.Path, file: str = "") -> Broken:
    file = file or raw.text("file")
    made = Broken(folder / file, raw.text("reason"), _predicates(raw, "signature"))
    raw.done()
    return made


def _predicates(raw: Table, key: str, default: tuple | None = None) -> tuple[Predicate, ...]:
    sources = raw.take(key, list, default)
    try:
        made = predicates.parse_all(sources)
    except predicates.PredicateError as error:
        raise raw.error(key, str(error)) from error
    if not made and default is None:
        raise raw.error(key, "it is empty")
    return made


def _devices(raw: Table, kind: str) -> tuple[str, ...]:
    """Read where a lab can be checked; by default wherever its kind is measured."""
    possible = figures.DEVICES[:1] if kind in figures.CPU_ONLY else figures.DEVICES
    made = raw.texts("devices", possible)
    for device in made:
        if device not in figures.DEVICES:
            raise raw.error("devices", f"{device!r} is none of {', '.join(figures.DEVICES)}")
        if device not in possible:
            raise raw.error(
                "devices", f"{device!r}, and the kind {kind} runs on the CPU alone: {figures.CPU_ONLY[kind]}"
            )
    if "cpu" not in made:
        raise raw.error("devices", "the CPU is not among them, and every lab is proved there")
    return made


def _check_figures(lab: Lab, where: str) -> None:
    """Find figures that the checker does not measure before a run does."""
    if lab.kind not in figures.KINDS:
        raise LabError(f"{where}: kind: {lab.kind!r} is none of {', '.join(figures.KINDS)}")
    measured = figures.of(lab.kind)
    groups = [lab.healthy, lab.notes, lab.broken.signature, *(each.signature for each in lab.wrong_fixes)]
    for predicate in (each for group in groups for each in group):
        asked = {*predicate.names, *predicates.fields(predicate.when_holds), *predicates.fields(predicate.when_fails)}
        for name in sorted(asked - set(measured)):
            raise LabError(f"{where}: {predicate}: {name!r} is no figure. Measured are: {', '.join(measured)}")


def signature(lab: Lab) -> tuple[Predicate, ...]:
    """Return what the broken run must show: the lab's own signature, and of its failures' what this kind measures."""
    measured = set(figures.of(lab.kind))
    if lab.false_alarm:
        return lab.broken.signature
    of_failures = (each for id in lab.failures for each in registry.get(id).signature)
    return (*lab.broken.signature, *(each for each in of_failures if measured.issuperset(each.names)))


def broken_rules(lab: Lab) -> list[str]:
    """Return what the lab's files do not keep of the rules for all labs; empty when all is well."""
    needed = [lab.train, lab.original, lab.solution, lab.folder / "hints.md", *(each.path for each in lab.wrong_fixes)]
    found = [f"{path.relative_to(lab.folder)} is missing" for path in needed if not path.is_file()]
    if found:
        return found
    todo = _todo(lab.broken.path)
    if len(todo) != 1:
        found.append(f"broken.py has {len(todo)} lines with TODO: it has exactly one")
    elif _todo(lab.solution) != todo:
        found.append("solution.py does not repeat the TODO of broken.py: a reader could not find the place")
    if not re.search(r"^\s*# \^\^\^ \S", lab.solution.read_text(encoding="utf-8"), re.MULTILINE):
        found.append("solution.py does not mark its repair with a line '# ^^^ why'")
    if (changed := changed_lines(lab)) > CHANGED:
        found.append(f"solution.py changes {changed} lines of code: {CHANGED} at most, or nobody sees the repair")
    if re.search(r"^\s*(from|import) failurelab\b", lab.broken.path.read_text(encoding="utf-8"), re.MULTILINE):
        found.append("broken.py imports failurelab: a lab is a script as users write it")
    if len(lab.hints) != HINTS or any(len(a) >= len(b) for a, b in zip(lab.hints, lab.hints[1:])):
        found.append(f"hints.md must have {HINTS} hints under '## ' headings, each longer than the one before")
    if not lab.wrong_fixes:
        found.append("no wrong fix is declared: what do people try first?")
    declared = {each.path for each in lab.wrong_fixes}
    there = set((lab.folder / "wrong_fixes").glob("*.py"))
    found += [f"wrong_fixes/{path.name} is not declared in lab.toml" for path in sorted(there - declared)]
    return found


def changed_lines(lab: Lab) -> int:
    """Return how many lines of code the solution adds, takes away or changes; comments and docstrings do not count."""
    old, new = (_code(path) for path in (lab.broken.path, lab.solution))
    matches = difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in matches if kind != "equal")


def _code(path: pathlib.Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    for node in (each for each in ast.walk(tree) if isinstance(each, documented) and ast.get_docstring(each)):
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


def _todo(path: pathlib.Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "TODO" in line]
