"""What preflight answers with: findings, what held, what does not apply, and what could not be checked."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """A failure that the script has.

    Attributes:
        failure: its id in the registry.
        evidence: what was measured, with its figure and the scale that makes it large.
        repair: what to change: the next step in one sentence, or a unified diff of the script's own lines.
        notebook: the notebook that tells the story, `09_rounded_away`; None where there is none.
    """

    failure: str
    evidence: str
    repair: str
    notebook: str | None = None


@dataclasses.dataclass(frozen=True)
class Held:
    """A failure that was looked for, and is not there.

    Attributes:
        failure: its id in the registry.
        evidence: what was measured, with its figure.
        control: what the same measurement said, on the same model and batch, when the failure was planted. A judge
            that would not have seen the failure is blind, and says NotChecked.
    """

    failure: str
    evidence: str
    control: str


@dataclasses.dataclass(frozen=True)
class NotApplicable:
    """A failure that this script cannot have: what it needs is not there (no adapter, no second process), and why."""

    failure: str
    why: str


@dataclasses.dataclass(frozen=True)
class NotChecked:
    """A failure that could not be looked for, and why: what a small random model cannot tell is never a PASS."""

    failure: str
    why: str


Answer = Finding | Held | NotApplicable | NotChecked
