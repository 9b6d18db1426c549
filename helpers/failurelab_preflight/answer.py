"""What preflight answers with: what was said of each failure (`finding`), and the answer that they make up.

The same objects cross from the script's process to the command, to the screen, and to `--json`: `to_json` and
`from_json` are the only ones. Two answers speak of the same thing if their keys are equal; no sentence is compared.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from failurelab import __version__, failures
from failurelab.errors import FailureLabError
from failurelab.failures import figures
from failurelab.failures.loader import PACKAGES
from failurelab_preflight.finding import Finding, Quantity, Verdict
from failurelab_preflight.reward_table import RewardTable

SCHEMA = 2  # of the answer as JSON; docs/ci.md has its keys
SEED = 0  # of each run


class SchemaError(FailureLabError):
    """A saved answer cannot be read; the message says why and the next step."""

    exit_status = 2


COMMAND_LINE = "command line"
KNOWN = ".known"  # beside a run's report: what its judges have said so far


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
class Effect:
    """What a script does beside its training: it writes a file, starts a process, connects to a host."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


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
    def ended_by_cut(self) -> list[Finding]:
        """What ended the run and may be the cut's: then whether the script ends so is not known."""
        return [finding for finding in self.not_checked if finding.ends]

    @property
    def left_by_patch(self) -> list[Finding]:
        """What is there still in the run with all of `patch`: what no edit repairs, and what is suspected."""
        return [finding for finding in self.accusations if finding.verdict is Verdict.SUSPECTED or not finding.diff]

    @property
    def exit_status(self) -> int:
        """4 if an edit was not tried, 1 if something is named or suspected, 3 if the script was not asked, else 0."""
        if self.compared and self.compared.error:
            return 4
        return 1 if self.accusations else 3 if self.error or self.ended_by_cut else 0

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
    "F12", "F13", "F10", "F9", "F11", "callback",
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
