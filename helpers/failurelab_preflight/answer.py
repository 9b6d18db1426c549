"""What preflight answers with: findings, each with a verdict and a key that stays, and the answer that they make up.

A judge says what it has measured as a `Finding`: measured and bad (FOUND), read and bad (SUSPECTED), looked for and not
there (HELD), not to be told here (NOT CHECKED), or nothing that this script can have (DOES NOT APPLY). What is there,
and is forgiven by Adam or by time, is NOTED. Preflight then runs the script again with the repair of what was FOUND: it
is NAMED when it comes again without the repair and its judge says HELD with it, and SUSPECTED with a reason otherwise
(`trials`).

The same objects cross from the script's process to the command, to the screen, and to `--json`: `to_json` and
`from_json` are the only ones. Two answers speak of the same thing if their keys are equal; no sentence is compared.
"""

import dataclasses
import enum
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from failurelab import __version__, failures
from failurelab.errors import FailureLabError
from failurelab.failures import figures
from failurelab.failures.loader import PACKAGES
from failurelab_preflight.rewards.table import RewardTable

SCHEMA = 2  # of the answer as JSON; docs/ci.md has its keys
SEED = 0  # of each run


class SchemaError(FailureLabError):
    """A saved answer cannot be read; the message says why and the next step."""

    exit_status = 2


class Verdict(str, enum.Enum):
    """What is said of a failure."""

    FOUND = "FOUND"  # measured in one run, and its repair not tried yet
    NAMED = "NAMED"
    NOTED = "NOTED"
    SUSPECTED = "SUSPECTED"
    HELD = "HELD"
    NOT_CHECKED = "NOT CHECKED"
    NOT_APPLICABLE = "DOES NOT APPLY"


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number that was measured.

    Attributes:
        name: what it is, such as `tensors without a gradient`.
        value: the number.
        unit: such as `nats a token`; empty for a count.
        scale: what makes it large or small: the number of all, or what rounding gives; None where there is none.
    """

    name: str
    value: float
    unit: str = ""
    scale: float | None = None


@dataclasses.dataclass(frozen=True)
class Location:
    """A line of the script's own code, from 1; of a notebook the code cell, from 1, and the line in it."""

    file: str
    line: int
    cell: int = 0

    def __str__(self) -> str:
        return f"{pathlib.PurePath(self.file).name}, {self.within}"

    @property
    def within(self) -> str:
        """The place without the file's name."""
        return f"cell {self.cell}, line {self.line}" if self.cell else f"line {self.line}"


SCRIPT, RELEASE, CUT = "the script", "this release", "what was cut"  # the origins of a finding
COMMAND_LINE = "command line"
KNOWN = ".known"  # beside a run's report: what its judges have said so far


@dataclasses.dataclass(frozen=True)
class Change:
    """What a run does otherwise than the script says; a run of the next round adds to it.

    Attributes:
        files: the whole text of each file of the script's own that is edited, by its path; the script's command line
            is one of them, under the name COMMAND_LINE.
    """

    files: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is in force in the training, such as the dtype of the weights, and what was given where that differs."""

    name: str
    value: str
    given: str = ""


@dataclasses.dataclass(frozen=True)
class Changed:
    """A figure of two measurements; None where it was not measured. `place` is of what it is: a part, or empty."""

    place: str
    name: str
    before: float | None
    after: float | None
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Differences:
    """What is otherwise in one measurement than in the one before it; of failures the keys.

    Attributes:
        what: the edit, or the measurement before, in words.
        healed: accused before, HELD after, and nothing came.
        unclear: accused before, neither accused nor healed after.
        came: accused after, where it was measured before and was not there.
        shown: accused after, and not measured before.
        stayed: accused in both.
        figures: that are others.
        error: why there is no comparison: the edit does not apply, or ends the script in this error.
    """

    what: str
    healed: list[str] = dataclasses.field(default_factory=list)
    unclear: list[str] = dataclasses.field(default_factory=list)
    came: list[str] = dataclasses.field(default_factory=list)
    shown: list[str] = dataclasses.field(default_factory=list)
    stayed: list[str] = dataclasses.field(default_factory=list)
    figures: list[Changed] = dataclasses.field(default_factory=list)
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one judge says of one failure.

    What a release does to everybody, and only slows a run, is NOTED, whichever judge measured it.

    Attributes:
        failure: its id in the registry.
        evidence: what was measured or read, with its figure and the scale that makes it large. Where a failure is
            HELD it is the figure of a repair that was tried, too.
        repair: what to change: the next step in one sentence.
        undo: what takes this failure away and nothing else, for a run that tries it; or several such, of which the
            first that heals is taken; None where there is no such thing. It stays in the script's process.
        tried: what the same measurement said with the failure undone: in a run with its repair, or by the judge on the
            live objects (other rows, another reward). Empty where nothing was undone.
        ends: whether it ends the run in an error by itself, before anything else can be seen.
        part: which of several things in the script has it, such as `reward_funcs[1]` or `max_prompt_length`.
        fault: which of several faults of one failure that thing has; empty where there is one.
        verdict: see `Verdict`.
        why: why it is not named, or could not be checked, or does not apply.
        control: what the same measurement said, on the same model and batch, when the failure was planted. A judge
            that would not have seen the failure is blind, and says NOT CHECKED.
        figures: the numbers of `evidence`.
        place: the line that its repair changes; None where there is none.
        changes: what runs with its repairs do otherwise, one for each repair of `undo`.
        diff: its repair as a diff of the script, on top of the repairs of the rounds before.
        round: in which it was named, from 1.
        origin: what makes it, where that is known: SCRIPT, RELEASE or CUT.
        mild: whether what is learned hardly changes by it: it is a constant size that Adam cancels, or a run recovers.
    """

    failure: str
    evidence: str = ""
    repair: str = ""
    undo: Any = None
    tried: str = ""
    ends: bool = False
    part: str = ""
    fault: str = ""
    verdict: Verdict = Verdict.FOUND
    why: str = ""
    control: str = ""
    figures: tuple[Quantity, ...] = ()
    place: Location | None = None
    changes: tuple[Change, ...] = ()
    diff: str = ""
    round: int = 0
    origin: str = ""
    mild: bool = False

    def __post_init__(self) -> None:
        if self.accuses and self.origin == RELEASE and self.harm == "slows":
            object.__setattr__(self, "verdict", Verdict.NOTED)

    @classmethod
    def noted(cls, failure: str, evidence: str, repair: str = "", **more: Any) -> "Finding":
        """Return a failure that is there, and leaves what is learned as it is."""
        return cls(failure, evidence, repair, verdict=Verdict.NOTED, **more)

    @classmethod
    def suspected(cls, failure: str, evidence: str, why: str, repair: str = "", **more: Any) -> "Finding":
        """Return a failure that speaks from arguments, versions or texts alone, and why that is no proof."""
        return cls(failure, evidence, repair, verdict=Verdict.SUSPECTED, why=why, **more)

    @classmethod
    def held(cls, failure: str, evidence: str, control: str, **more: Any) -> "Finding":
        """Return that a failure was looked for and is not there, and what was seen of it when it was planted."""
        return cls(failure, evidence, verdict=Verdict.HELD, control=control, **more)

    @classmethod
    def not_checked(cls, failure: str, why: str, **more: Any) -> "Finding":
        """Return that a failure could not be looked for: what a small random model cannot tell is never a PASS."""
        return cls(failure, verdict=Verdict.NOT_CHECKED, why=why, **more)

    @classmethod
    def not_applicable(cls, failure: str, why: str) -> "Finding":
        """Return that this script cannot have a failure: what it needs is not there (no adapter, no second process)."""
        return cls(failure, verdict=Verdict.NOT_APPLICABLE, why=why)

    @property
    def key(self) -> str:
        """What stays the same from run to run: `F2`, `F11:max_prompt_length`, `F14:reward_funcs[1]:line breaks`.

        It holds no line of the script, for a repair moves the lines.
        """
        return ":".join(filter(None, (self.failure, self.part, self.fault)))

    @property
    def accuses(self) -> bool:
        """Whether it says that the failure is there, or may be."""
        return self.verdict in (Verdict.FOUND, Verdict.NAMED, Verdict.SUSPECTED)

    @property
    def harm(self) -> str:
        """What it does to the run, where that was measured: blocks, learns nothing, slows, memory; else empty."""
        if self.ends:
            return "blocks"
        lost = next((figure for figure in self.figures if figure.name == "tensors_without_gradient"), None)
        if lost is not None and lost.value and lost.value == lost.scale:
            return "blocks" if self.failure == "F2" else "learns nothing"
        return _HARM.get(self.failure, "slows" if self.mild else "")

    @property
    def notebook(self) -> str:
        """The notebook that tells why; empty where the registry has none."""
        return next((known.notebook or "" for known in failures.all() if known.id == self.failure), "")

    def covers(self, other: "Finding") -> bool:
        """Whether it speaks of the same thing as another, which may say less of it: not which part, or which fault."""
        return f"{self.key}:".startswith(f"{other.key}:")

    def to_json(self, texts: bool = True) -> dict[str, Any]:
        """Return it as JSON can hold it; what is empty is left out, but for what every reader asks for.

        Without `texts` it holds no path, and nothing that may quote the script, its rows or its error.
        """
        if not texts:
            place = self.place and dataclasses.replace(self.place, file=pathlib.PurePath(self.place.file).name)
            blank: dict[str, Any] = dict.fromkeys(_TEXTS, "")
            told = dataclasses.replace(self, place=place, changes=(), **blank)
            return {name: value for name, value in told.to_json().items() if name not in _TEXTS}
        always = ("failure", "evidence", *(("repair", "tried", "diff") if self.accuses else ()))
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "undo"}
        kept = {name: value for name, value in fields.items() if value or name in always}
        kept |= {"figures": [dataclasses.asdict(figure) for figure in self.figures]} if self.figures else {}
        kept |= {"place": dataclasses.asdict(self.place)} if self.place else {}
        kept |= {"changes": [dataclasses.asdict(change) for change in self.changes]} if self.changes else {}
        kept |= {"verdict": self.verdict.value}
        return {"key": self.key} | kept | ({"notebook": self.notebook or None} if self.accuses else {})

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], verdict: Verdict = Verdict.NAMED) -> "Finding":
        """Return a finding that was JSON, with this verdict where it names none.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        names = {field.name for field in dataclasses.fields(cls)} - {"undo"}
        values = {name: value for name, value in entry.items() if name in names}
        values["verdict"] = Verdict(values.get("verdict", verdict))
        values["figures"] = tuple(Quantity(**figure) for figure in values.get("figures", ()))
        values["place"] = Location(**values["place"]) if values.get("place") else None
        values["changes"] = tuple(Change(**change) for change in values.get("changes", ()))
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a script does beside its training: it writes a file, starts a process, connects to a host."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


_TEXTS = ("evidence", "repair", "tried", "why", "control", "diff")  # of a finding
# What these do wherever they are; of others it hangs on the figure. F3a keeps rows, F23 and F10 leave no gradient.
_HARM = {"F3a": "memory", "F10": "learns nothing", "F23": "learns nothing", "F22": "blocks", "F5": "blocks"}
# The lists of the answer as JSON, and what is said in each.
_LISTS = {
    "findings": (Verdict.NAMED, Verdict.FOUND),
    "noted": (Verdict.NOTED,),
    "suspected": (Verdict.SUSPECTED,),
    "held": (Verdict.HELD,),
    "not_applicable": (Verdict.NOT_APPLICABLE,),
    "not_checked": (Verdict.NOT_CHECKED,),
}


@dataclasses.dataclass
class Answer:
    """What became of one script, or of one run of it.

    Attributes:
        script: its path, as given.
        versions: of the libraries in its Python.
        findings: what all judges said.
        error: the script's own, or why it could not be asked; empty if nothing.
        script_sha256: of the script's bytes, so that an answer is not taken for that of another script.
        cut: what of the work was cut.
        notes: more to know.
        effects: what the script does beside its training.
        patch: all repairs that healed, as `git apply` takes them in `patch_folder`; empty where none is an edit.
        patch_folder: see `patch`.
        rewards: what the script's reward functions pay for made-up completions; None where they were not asked.
        in_force: what is in force in the training.
        measured: figures of the run itself, by their names in the table of figures.
        compared: with which measurement, or by which edit, and what is otherwise.
        demands_gpu: whether the script ended by itself, after it had asked for GPUs and was told that there are none.
        refuses_cut: the numbers that were cut where the making of a trainer ended in an error, a text each.
    """

    script: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    error: str = ""
    script_sha256: str = ""
    cut: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    effects: list[Effect] = dataclasses.field(default_factory=list)
    patch: bytes = b""
    patch_folder: str = ""
    rewards: RewardTable | None = None
    in_force: list[Setting] = dataclasses.field(default_factory=list)
    measured: dict[str, float] = dataclasses.field(default_factory=dict)
    compared: Differences | None = None
    demands_gpu: bool = False
    refuses_cut: list[str] = dataclasses.field(default_factory=list)

    def of(self, *verdicts: Verdict) -> list[Finding]:
        """Return the findings with one of these verdicts."""
        return [finding for finding in self.findings if finding.verdict in verdicts]

    # Those with one verdict: what was measured in a run and not tried yet, what was repaired in turn, and so on.
    found = property(lambda self: self.of(Verdict.FOUND))
    named = property(lambda self: self.of(Verdict.NAMED))
    noted = property(lambda self: self.of(Verdict.NOTED))
    suspected = property(lambda self: self.of(Verdict.SUSPECTED))
    held = property(lambda self: self.of(Verdict.HELD))
    not_checked = property(lambda self: self.of(Verdict.NOT_CHECKED))
    not_applicable = property(lambda self: self.of(Verdict.NOT_APPLICABLE))

    @property
    def accused(self) -> list[Finding]:
        """What is there, or may be, in the order of the judges."""
        return [finding for finding in self.findings if finding.accuses]

    @property
    def quantities(self) -> dict[tuple[str, str], Quantity]:
        """All figures: by what each is of (a part of the script, or empty for all of it) and by its name."""
        told = {("", name): Quantity(name, value, figures.table()[name].unit) for name, value in self.measured.items()}
        for finding in self.findings:
            for figure in finding.figures:
                told.setdefault((finding.part, figure.name), figure)
        return told

    @property
    def accusations(self) -> list[Finding]:
        """What is named, then what is suspected; behind both what is mild."""
        return sorted([*self.named, *self.suspected], key=lambda finding: finding.mild)

    @property
    def left_by_patch(self) -> list[Finding]:
        """What is there still in the run with all of `patch`: what no edit repairs, and what is suspected."""
        return [finding for finding in self.accusations if finding.verdict is Verdict.SUSPECTED or not finding.diff]

    @property
    def exit_status(self) -> int:
        """4 if an edit was not tried, 1 if something is named or suspected, 3 if the script was not asked, else 0."""
        if self.compared and self.compared.error:
            return 4
        ended = self.error or any(finding.ends for finding in self.not_checked)
        return 1 if self.accusations else 3 if ended else 0

    def settle(self, findings: Iterable[Finding]) -> None:
        """Take the findings of all runs: the worst first, without what a worse one overrules, and each failure once."""
        findings = list(findings)
        self.findings = [finding for finding in findings if finding.verdict is Verdict.NAMED]
        self.findings.sort(key=lambda finding: (finding.round, rank(finding.failure)))
        doubts = [
            finding
            for finding in findings
            if finding.verdict is Verdict.SUSPECTED and not any(named.covers(finding) for named in self.named)
        ]
        self.findings += sorted(doubts, key=lambda finding: (not finding.ends, rank(finding.failure)))
        listed = {finding.failure for finding in self.findings}
        for verdict in (Verdict.NOTED, Verdict.NOT_CHECKED, Verdict.HELD, Verdict.NOT_APPLICABLE):
            # what could not be checked of one part is told beside what was found of another
            left = [
                finding
                for finding in findings
                if finding.verdict is verdict
                and (finding.failure not in listed or (finding.part and verdict is Verdict.NOT_CHECKED))
            ]
            self.findings += _together(left)
            listed |= {finding.failure for finding in left}

    def to_json(self, texts: bool = True) -> dict[str, Any]:
        """Return it as JSON can hold it: a row for each failure of the registry, the figures, and lists of findings.

        Without `texts` no path and nothing that may quote the script, its rows or its error is in it.
        """
        lists = {name: [each.to_json(texts) for each in self.of(*verdicts)] for name, verdicts in _LISTS.items()}
        told: dict[str, Any] = {"schema": SCHEMA, "failurelab": __version__, "seed": SEED, "failures": self._rows()}
        known = {name: quantity.value for (_, name), quantity in reversed(self.quantities.items())}
        told["figures"] = {name: known.get(name) for name in figures.table()}
        told |= {"in_force": [dataclasses.asdict(setting) for setting in self.in_force], "measured": self.measured}
        told["compared"] = self.compared and dataclasses.asdict(self.compared)
        told |= lists | {"script_sha256": self.script_sha256, "versions": self.versions}
        if not texts:
            if told["compared"]:
                told["compared"] |= {"what": "", "error": bool(self.compared and self.compared.error)}
            public = {name: self.versions[name].partition("+")[0] for name in PACKAGES if name in self.versions}
            return told | {"error": bool(self.error), "versions": public}
        told |= {name: getattr(self, name) for name in ("cut", "notes", "error", "script")}
        told |= {"effects": [dataclasses.asdict(effect) for effect in self.effects]} if self.effects else {}
        told |= {name: value for name in ("demands_gpu", "refuses_cut") if (value := getattr(self, name))}
        return told | {"rewards": self.rewards.to_json() if self.rewards else None}

    def _rows(self) -> dict[str, dict[str, Any]]:
        """Return the verdict on each failure of the registry, and the keys of what says so, the worst of them first."""
        rows: dict[str, dict[str, Any]] = {}
        for failure in failures.all():
            said = sorted(
                (each for each in self.findings if each.failure == failure.id),
                key=lambda finding: _WORST.index(finding.verdict),
            )
            verdict = said[0].verdict if said else Verdict.NOT_CHECKED
            keys = list(dict.fromkeys(each.key for each in said if each.verdict is verdict))
            rows[failure.id] = {"verdict": verdict.value, "keys": keys, "looked_at": bool(said)}
        return rows

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Answer":
        """Return an answer that was JSON, of this release or of one that wrote no verdicts.

        Raises:
            SchemaError: a newer release wrote it.
            KeyError, TypeError, ValueError: it is none.
        """
        if "findings" not in values:
            raise KeyError("findings")
        if (schema := int(values.get("schema", 1))) > SCHEMA:
            newer = (
                f"failurelab {values.get('failurelab', '?')} wrote schema {schema}, and this one reads up to {SCHEMA}"
            )
            raise SchemaError(f"{newer}. Next: upgrade failurelab, or measure again with this one")
        plain = {field.name for field in dataclasses.fields(cls)} - {"findings", "patch", "patch_folder", "compared"}
        told = {name: value for name, value in values.items() if name in plain and value is not None}
        told["effects"] = [Effect(**effect) for effect in told.get("effects", ())]
        told["in_force"] = [Setting(**setting) for setting in told.get("in_force", ())]
        told["rewards"] = RewardTable.from_json(told["rewards"]) if told.get("rewards") else None
        told["error"] = "an error" if told.get("error") is True else told.get("error") or ""  # its text may be left out
        findings = [
            Finding.from_json(entry, verdicts[0]) for name, verdicts in _LISTS.items() for entry in values.get(name, ())
        ]
        return cls(findings=findings, **told)


# Worst first: what ends a run, what makes it learn nothing or the wrong thing, what costs memory.
ORDER = (
    "release", "given", "cut", "F22", "F23", "F2", "F5", "F8", "F3b", "F1", "F7", "F16", "F21", "F14",
    "F12", "F13", "F10", "F9", "F11", "callback", "first rewards",
    "F19", "F15", "F20",
)  # fmt: skip


# Of one failure several things may be said, of its parts.
_WORST = [
    Verdict.NAMED, Verdict.FOUND, Verdict.SUSPECTED, Verdict.NOTED, Verdict.NOT_CHECKED, Verdict.HELD,
    Verdict.NOT_APPLICABLE,
]  # fmt: skip


def rank(failure: str) -> int:
    """Return the place of a failure among all, the worst first."""
    return ORDER.index(failure) if failure in ORDER else len(ORDER)


def _together(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield one finding for each failure, in the order of their ids: what else is said of it is put behind it."""
    by_failure: dict[str, list[Finding]] = {}
    for finding in findings:
        by_failure.setdefault(finding.failure, []).append(finding)
    for _, same in sorted(by_failure.items(), key=lambda item: _number(item[0])):
        evidence, control, why = (
            "; ".join(filter(None, dict.fromkeys(getattr(finding, name) for finding in same)))
            for name in ("evidence", "control", "why")
        )
        yield dataclasses.replace(same[0], evidence=evidence, control=control, why=why)


def _number(failure: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, failure))
    return (int(digits) if failure.startswith("F") and digits else 10**6, failure)
