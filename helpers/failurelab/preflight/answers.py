"""What preflight answers with: accusations, what held, what does not apply, and what could not be checked.

A judge accuses with `Finding` where it has measured, and with `Suspected` where it has not. Preflight then runs the
script again with the finding's `undo`: a finding is *named* when it comes again without the undo and its judge says
`Held` with it. Every other finding is suspected too, with the reason.
"""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from failurelab.preflight.repairs import Repair


@dataclasses.dataclass(frozen=True)
class Finding:
    """A failure that was measured in the script.

    Attributes:
        failure: its id in the registry.
        evidence: what was measured, with its figure and the scale that makes it large.
        repair: what to change: the next step in one sentence.
        undo: what takes this failure away and nothing else, for a run that tries it; or several such, of which the
            first that heals is taken; None where there is no such thing.
        tried: what the same measurement said when the judge itself undid the failure on the live objects: other rows,
            another reward. Empty where it did not.
        ends: whether it ends the run in an error by itself, before anything else can be seen.
        about: which of several things has it, such as a reward function's name; findings of one failure differ by it.
    """

    failure: str
    evidence: str
    repair: str
    undo: "Repair | tuple[Repair, ...] | None" = None
    tried: str = ""
    ends: bool = False
    about: str = ""


@dataclasses.dataclass(frozen=True)
class Suspected:
    """A failure that speaks from arguments, versions or texts alone: it is told, and never named.

    Attributes:
        failure: its id in the registry.
        evidence: what was read.
        why: why that is no proof: what was not measured.
        repair: what to change, in one sentence.
    """

    failure: str
    evidence: str
    why: str
    repair: str = ""


@dataclasses.dataclass(frozen=True)
class Held:
    """A failure that was looked for, and is not there.

    Attributes:
        failure: its id in the registry.
        evidence: what was measured, with its figure. It is the figure of a repair that was tried, too.
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
    """A failure that could not be looked for, and why: what a small random model cannot tell is never a PASS.

    `about` says which of several things could not, as for a Finding; a finding about another does not overrule it.
    """

    failure: str
    why: str
    about: str = ""


Answer = Finding | Suspected | Held | NotApplicable | NotChecked
