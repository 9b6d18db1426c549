"""What is said of one failure: a finding, with a verdict and a key that stays.

A judge says what it has measured as a `Finding`: measured and bad (FOUND), read and bad (SUSPECTED), looked for and not
there (HELD), not to be told here (NOT CHECKED), or nothing that this script can have (DOES NOT APPLY). What is there,
and is forgiven by Adam or by time, is NOTED. Preflight then runs the script again with the repair of what was FOUND: it
is NAMED when it comes again without the repair and its judge says HELD with it, and SUSPECTED with a reason otherwise
(`trials`).
"""

import dataclasses
import enum
import pathlib
from collections.abc import Mapping
from typing import Any

from failurelab import failures

SCRIPT, RELEASE, CUT = "the script", "this release", "what was cut"  # the origins of a finding


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


@dataclasses.dataclass(frozen=True)
class Change:
    """What a run does otherwise than the script says; a run of the next round adds to it.

    Attributes:
        files: the whole text of each file of the script's own that is edited, by its path; the script's command line
            is one of them, under the name COMMAND_LINE.
    """

    files: dict[str, str] = dataclasses.field(default_factory=dict)


_TEXTS = ("evidence", "repair", "tried", "why", "control", "diff")  # of a finding
# What these do wherever they are; of others it hangs on the figure. F3a keeps rows, F23 and F10 leave no gradient.
_HARM = {"F3a": "memory", "F10": "learns nothing", "F23": "learns nothing", "F22": "blocks", "F5": "blocks"}


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
    def is_there(self) -> bool:
        """Whether it says that the failure is there, or may be, and if it is only noted."""
        return self.accuses or self.verdict is Verdict.NOTED

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
