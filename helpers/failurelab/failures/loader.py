"""Reading the registry: what a failure's file must hold, and what is said when it does not."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from failurelab.errors import FailureLabError
from failurelab.failures import figures, predicates
from failurelab.failures.toml_table import Table

VERDICTS = ("true", "partly true", "refuted")
KNOWN_BY = ("run", "code", "thread")
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes")
_MOST = 4  # predicates of a mechanism
_ID = re.compile(r"F[1-9]\d*[a-z]?")
_THREAD = re.compile(r"([\w.-]+) #(\d+)")
_REPOSITORIES = {
    "TRL": "huggingface/trl",
    "transformers": "huggingface/transformers",
    "peft": "huggingface/peft",
    "accelerate": "huggingface/accelerate",
    "open-r1": "huggingface/open-r1",
    "bitsandbytes": "bitsandbytes-foundation/bitsandbytes",
    "torch": "pytorch/pytorch",
    "deepspeed": "deepspeedai/DeepSpeed",
    "verl": "verl-project/verl",
}


class RegistryError(FailureLabError):
    """A failure is not known, or its file is not as it must be; the message names the file and the key."""


@dataclasses.dataclass(frozen=True)
class Thread:
    """A public thread upstream, such as `TRL #2671`, and what it says."""

    thread: str
    what: str

    @property
    def url(self) -> str:
        """Its address; GitHub leads from an issue's address to a pull request of that number."""
        name, number = self.thread.split(" #")
        return f"https://github.com/{_REPOSITORIES[name]}/issues/{number}"


@dataclasses.dataclass(frozen=True)
class Stack:
    """Versions that belong together: each package named must be installed in a version that its specifier holds.

    `only_own_code` says that trl's trainers are spared in these versions and a loop of one's own is not. `only_where`
    says of which machines it holds, such as those without Triton. `probes` are
    patterns of the atlas' set-ups that hold this statement; where there are none, `not_measured` says why. `forgiven`
    says why a run learns with it.
    """

    what: str
    versions: Mapping[str, str]
    thread: str = ""
    only_own_code: bool = False
    only_where: str = ""
    probes: tuple[str, ...] = ()
    not_measured: str = ""
    forgiven: str = ""

    def asks(self, probe: str) -> bool:
        """Return whether a set-up of the atlas, by its id, holds this statement."""
        return any(re.fullmatch(pattern, probe) for pattern in self.probes)

    def holds(self, installed: Mapping[str, str]) -> bool:
        """Return whether `installed` (package to version) is in it, by the release that each version is or precedes.

        Raises:
            RegistryError: what is installed has no version.
        """
        return all(
            package in installed and _release(package, installed) in SpecifierSet(text)
            for package, text in self.versions.items()
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{package} {text}" for package, text in self.versions.items())
        return f"{versions}, {self.only_where}" if self.only_where else versions


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a popular explanation says, and what came of it. The number is the same in the whole course."""

    number: int
    claim: str
    verdict: str
    because: str
    known_by: str


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """One way in which a failure comes about, as predicates over figures; `verdicts.judge` decides by it.

    Attributes:
        name: in a word or three, such as `mask`.
        found: what holds, all of it, of a run that has the failure in this way.
        needs: what holds of a run that could show it: prompts of different lengths, rewards that differ.
        applies: what holds of a set-up that can have it at all; nothing where every one can.
        control: which mistake is planted to see that the measurement would find it.
        says: what was found, with `{figure}` for values.
    """

    name: str
    found: tuple[predicates.Predicate, ...]
    needs: tuple[predicates.Predicate, ...]
    applies: tuple[predicates.Predicate, ...]
    control: str
    says: str

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all figures that its predicates are about."""
        every = (*self.applies, *self.needs, *self.found)
        return tuple(dict.fromkeys(name for predicate in every for name in predicate.names))


@dataclasses.dataclass(frozen=True)
class Failure:
    """One thing that goes wrong; see the fields of the files in this folder.

    `notebook` is empty until there is one about it. `check` says in one line what decides. `notices` are those of its
    `symptoms` that healthy runs print too, each with what decides then.
    """

    id: str
    title: str
    title_zh: str
    notebook: str
    what_breaks: str
    symptoms: tuple[str, ...]
    root_cause: str
    mechanisms: tuple[Mechanism, ...]
    eras: tuple[str, ...]
    check: str
    fix: str
    helper: str
    affected: tuple[Stack, ...]
    fixed: tuple[Stack, ...]
    threads: tuple[Thread, ...]
    claims: tuple[Claim, ...]
    seen_as: tuple[str, ...] = ()
    notices: Mapping[str, str] = dataclasses.field(default_factory=dict)


@functools.cache
def load(folder: pathlib.Path) -> dict[str, Failure]:
    """Read and check all files of a registry; return its failures by id.

    Raises:
        RegistryError: a file is not as it must be, or an id is used twice, or retired.
    """
    retired = retired_ids(folder)
    failures: dict[str, Failure] = {}
    claimed: dict[int, str] = {}
    for path in sorted(folder.glob("F*.toml"), key=_order):
        failure = _failure(path)
        if failure.id in retired:
            raise RegistryError(f"{path.name}: id {failure.id} is retired: an id is never used again, see ids.toml")
        for claim in failure.claims:
            if claim.number in claimed:
                raise RegistryError(f"{path.name}: claim {claim.number} stands in {claimed[claim.number]} already")
            claimed[claim.number] = path.name
        failures[failure.id] = failure
    return failures


def _order(path: pathlib.Path) -> tuple[int, str]:
    """Return what F3a.toml is sorted by: its number, then its letter; a file of another name comes last."""
    number = re.match(r"F(\d+)", path.stem)
    return (int(number[1]) if number else 10**6, path.stem)


def retired_ids(folder: pathlib.Path) -> dict[str, str]:
    """Return the ids that have no file any more, each with why.

    Raises:
        RegistryError: the register of ids is not as it must be.
    """
    path = folder / "ids.toml"
    raw = Table.read(path, RegistryError)
    retired: dict[str, str] = raw.take("retired", dict)
    raw.done()
    for id in retired:
        if not _ID.fullmatch(id):
            raise RegistryError(f"{path.name}: {id!r} is no id; ids are F and a number, perhaps with a letter: F3a")
    return retired


def _failure(path: pathlib.Path) -> Failure:
    raw = Table.read(path, RegistryError)
    id = raw.text("id")
    if not _ID.fullmatch(id) or path.stem != id:
        raise RegistryError(f"{path.name}: id is {id!r}; it must be F and a number, and the file must be called so")
    failure = Failure(
        id=id,
        title=raw.text("title"),
        title_zh=raw.text("title_zh"),
        notebook=raw.text("notebook", ""),
        what_breaks=raw.text("what_breaks"),
        symptoms=raw.texts("symptoms"),
        root_cause=raw.text("root_cause").strip(),
        mechanisms=tuple(_mechanism(table) for table in raw.tables("mechanism")),
        eras=raw.texts("eras"),
        check=raw.text("check"),
        fix=raw.text("fix"),
        helper=raw.text("helper", ""),
        affected=tuple(_stack(table) for table in raw.tables("affected")),
        fixed=tuple(_stack(table) for table in raw.tables("fixed")),
        threads=tuple(_thread(table) for table in raw.tables("threads")),
        claims=tuple(_claim(table) for table in raw.tables("claims")),
        seen_as=raw.texts("seen_as", ()),
        notices={table.text("text"): table.text("decides") for table in raw.tables("notices")},
    )
    raw.done()
    for text in failure.notices:
        if text not in failure.symptoms:
            raise RegistryError(f"{path.name}: notices: {text!r} is none of its symptoms")
    for key in ("mechanisms", "affected", "threads"):
        if not getattr(failure, key):
            raise RegistryError(f"{path.name}: {key} is empty; a failure has at least one")
    return failure


def _mechanism(raw: Table) -> Mechanism:
    read: dict[str, tuple[predicates.Predicate, ...]] = {}
    for key in ("found", "needs", "applies"):
        try:
            read[key] = predicates.parse_all(raw.texts(key, None if key == "found" else ()))
        except predicates.PredicateError as error:
            raise raw.error(key, str(error)) from error
    mechanism = Mechanism(name=raw.text("name"), control=raw.text("control"), says=raw.text("says"), **read)
    raw.done()
    if not mechanism.found or sum(map(len, read.values())) > _MOST:
        raise raw.error("found", f"a mechanism has 1 to {_MOST} predicates: what needs more is a figure of its own")
    for name in (*mechanism.figures, *predicates.fields(mechanism.says)):
        if name not in figures.table():
            raise raw.error("found", f"{name!r} is no figure of figures.toml")
    return mechanism


def _stack(raw: Table) -> Stack:
    versions = {}
    for package, text in raw.take("versions", dict).items():
        if package not in PACKAGES:
            raise raw.error("versions", f"{package!r} is no package under study ({', '.join(PACKAGES)})")
        try:
            specifiers = SpecifierSet(text)
        except (InvalidSpecifier, TypeError, AttributeError) as error:
            raise raw.error(
                "versions", f"{package} = {text!r} is no PEP 440 specifier, such as '>=0.14,<0.16'"
            ) from error
        if not specifiers:
            raise raw.error("versions", f"{package} = {text!r} holds every version")
        versions[package] = text
    if not versions:
        raise raw.error("versions", "no package is named")
    thread = raw.text("thread", "")
    if thread:
        _check_thread(raw, thread)
    stack = Stack(
        raw.text("what"),
        versions,
        thread,
        raw.take("only_own_code", bool, False),
        raw.take("only_where", str, ""),
        raw.texts("probes", ()),
        raw.text("not_measured", ""),
        raw.text("forgiven", ""),
    )
    if bool(stack.probes) == bool(stack.not_measured):
        raise raw.error("probes", "name the set-ups of the atlas that hold it, or say why in not_measured")
    raw.done()
    return stack


def _thread(raw: Table) -> Thread:
    record = Thread(raw.text("thread"), raw.text("what"))
    _check_thread(raw, record.thread)
    raw.done()
    return record


def _check_thread(raw: Table, text: str) -> None:
    match = _THREAD.fullmatch(text)
    if not match or match[1] not in _REPOSITORIES:
        raise raw.error("thread", f"{text!r} must be like 'TRL #2671', with one of {', '.join(_REPOSITORIES)}")


def _claim(raw: Table) -> Claim:
    claim = Claim(
        raw.take("number", int), raw.text("claim"), raw.text("verdict"), raw.text("because"), raw.text("known_by")
    )
    for key, words in (("verdict", VERDICTS), ("known_by", KNOWN_BY)):
        if getattr(claim, key) not in words:
            raise raw.error(key, f"{getattr(claim, key)!r} is none of: {', '.join(words)}")
    raw.done()
    return claim


def release(version: str) -> Version:
    """Return the release that a version is, or precedes: 0.15.0 for 0.15.0.dev0, 0.15.0rc1 and 0.15.0+cpu.

    A specifier has no place for a pre-release of its own bound: 0.15.0.dev0 is neither in `<0.15` nor in `>=0.15`. What
    is installed from a repository after 0.14 calls itself so, and has the code of 0.15 as far as it was written.

    Raises:
        InvalidVersion: it is no version.
    """
    return Version(Version(version).base_version)


def _release(package: str, installed: Mapping[str, str]) -> Version:
    try:
        return release(installed[package])
    except InvalidVersion as error:
        raise RegistryError(f"{package} {installed[package]!r} is no version") from error
