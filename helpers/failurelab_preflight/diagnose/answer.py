"""What is told of one run: causes that something proves, or else signs and the look that decides.

A cause is named only where an error's text, a guard, preflight, or a figure that is the failure itself proves it. Where
none does and something is or may be wrong, no cause stands first: curves of ten causes look alike.
"""

import dataclasses
import functools
import pathlib
import shutil
import textwrap
import types
from collections.abc import Sequence
from typing import Any

from failurelab import failures
from failurelab.failures import predicates, verdicts
from failurelab.failures.predicates import Value
from failurelab.failures.toml_table import read_toml
from failurelab_preflight.diagnose.evidence import Proof, RunEvidence

RULES = pathlib.Path(__file__).with_name("rules.toml")


@dataclasses.dataclass(frozen=True)
class Look:
    """What to look at next: what to do, what to look at there, and what each outcome means.

    `answered_by` is the kind of file that has the answer, where there is one: then it needs no look.
    """

    do: str
    at: str
    then: list[str]
    answered_by: str = ""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A proof of one of `causes`, or with none of them a sign; `looks` by name, the first one first."""

    when: tuple[predicates.Predicate, ...]
    says: str
    causes: tuple[str, ...] = ()
    looks: tuple[str, ...] = ()

    @classmethod
    def read(cls, when: list[str], says: str, causes: Sequence[str] = (), looks: Sequence[str] = ()) -> "Rule":
        """Return a rule of the file."""
        return cls(predicates.parse_all(when), says, tuple(causes), tuple(looks))

    def holds(self, figures: dict[str, Value]) -> bool:
        """Return whether all its predicates are known to hold."""
        return verdicts.holds(self.when, figures) is True


@dataclasses.dataclass
class Cause:
    """A cause that is named: the failures of which the run has one for certain, what shows it, and what to do."""

    named: tuple[str, ...]
    title: str
    repair: str
    proofs: list[str]
    look: Look | None = None


@dataclasses.dataclass
class Diagnosis:
    """What is told of one run.

    Attributes:
        run: its name.
        causes: those that are named, in the order of what proves them: errors, guards, figures, preflight.
        abstained: something is, or may be, wrong, and the files do not tell what; then there are no causes.
        signs: what shows that something is wrong.
        looks: what to look at next, where it abstained; the first decides most.
        notes: lines that say how far this goes.
        evidence: what it rests on.
    """

    run: str
    causes: list[Cause]
    abstained: bool
    signs: list[str]
    looks: list[Look]
    notes: list[str]
    evidence: RunEvidence

    @property
    def healthy(self) -> bool:
        """Whether nothing that the rules know is wrong with it."""
        return not (self.causes or self.abstained)

    @property
    def exit_status(self) -> int:
        """0 for a healthy run, 1 where a cause is named, 3 where not."""
        return 0 if self.healthy else 3 if self.abstained else 1


@functools.cache
def rules() -> types.SimpleNamespace:
    """Return the file of rules, by its names; `causes` are those that are no failure of the registry."""
    read = types.SimpleNamespace(**read_toml(RULES))
    read.looks = {name: Look(**look) for name, look in read.looks.items()}
    read.proof, read.sign = ([Rule.read(**raw) for raw in kind] for kind in (read.proof, read.sign))
    return read


def decide(evidence: RunEvidence) -> Diagnosis:
    """Name what the files prove, or abstain where something is or may be wrong, or find nothing."""
    read, known, history = rules(), dict(evidence.figures), evidence.history
    looks = {rule.causes: read.looks[rule.looks[0]] for rule in read.proof if rule.looks}
    proofs = [Proof(rule.causes, predicates.fill(rule.says, known)) for rule in read.proof if rule.holds(known)]
    proofs = sorted([*evidence.proofs, *proofs], key=lambda proof: proof.of_script)
    harmless = [proof for proof in proofs if set(proof.failures) <= {*read.costs_memory_alone}]
    notes = [f"{proof.failures[0]}, {proof.says}: it costs memory, and harms no training" for proof in harmless]
    proofs = [proof for proof in proofs if proof not in harmless]
    if known.get("reward_course") == "rises":
        flat = [proof for proof in proofs if set(proof.failures) <= {*read.keeps_reward_flat}]
        proofs = [proof for proof in proofs if proof not in flat]
        known |= {"not_named": ", ".join(f"{' or '.join(proof.failures)} ({proof.says})" for proof in flat)}
    causes = _causes(proofs, looks)
    signs = [sign for sign in read.sign if sign.holds(known)]
    unknown = history is None or not history.grpo
    if history is not None and not history.grpo:
        notes.append("the log is of another kind of training: only its errors were looked up")
    if causes:
        return Diagnosis(evidence.name, causes, False, [], [], notes, evidence)
    if not (unknown or signs):
        return Diagnosis(evidence.name, [], False, [], [], notes + _limits(known), evidence)
    names = ["log", "script"] if unknown else list(dict.fromkeys(name for sign in signs for name in sign.looks))
    next_looks = [read.looks[name] for name in names if read.looks[name].answered_by not in evidence.kinds]
    told = [predicates.fill(sign.says, known) for sign in signs]
    notes += evidence.hints
    return Diagnosis(evidence.name, [], True, told, next_looks or [read.looks["known"]], notes, evidence)


def _causes(proofs: list[Proof], looks: dict[tuple[str, ...], Look]) -> list[Cause]:
    """Return a cause for each set of failures that something proves; what is certain settles what is one of several."""
    certain = {proof.failures[0] for proof in proofs if len(proof.failures) == 1}
    causes: dict[tuple[str, ...], Cause] = {}
    for proof in proofs:
        several = len(proof.failures) > 1
        if several and certain & set(proof.failures):
            continue
        if proof.failures not in causes:
            name = proof.failures[0]
            own = rules().causes.get(name)
            title, fix = (own["title"], own["repair"]) if own else (failures.get(name).title, failures.get(name).fix)
            causes[proof.failures] = Cause(proof.failures, title, "" if several else fix, [], looks.get(proof.failures))
        causes[proof.failures].proofs.append(proof.says)
    return list(causes.values())


def _limits(known: dict[str, Any]) -> list[str]:
    if known.get("steps_seen", 0) < 40 or known.get("entries", 0) < 6:
        seen = f"{known.get('entries', 0)} entries over {known.get('steps_seen', 0):g} steps"
        return [f"{seen} are too few to say whether it learns"]
    if known.get("reward_course") == "flat":
        return [f"the reward stays near its highest value, {known['reward_mean']:.3g}"]
    return []


def to_json(answer: Diagnosis) -> dict[str, Any]:
    """Return the answer as JSON can hold it."""
    told = dataclasses.asdict(dataclasses.replace(answer, evidence=RunEvidence("")))
    del told["evidence"]
    told |= {"healthy": answer.healthy, "read": answer.evidence.read, "not_read": answer.evidence.not_read}
    return told


def text(answer: Diagnosis) -> str:
    """Return the answer as lines for a terminal."""
    width = max(70, min(110, shutil.get_terminal_size().columns))
    lines: list[str] = []
    wrap = functools.partial(textwrap.wrap, width=width, subsequent_indent=" " * 7, break_on_hyphens=False)

    def say(text: str, first: str = "       ") -> None:
        lines.extend(wrap(text, initial_indent=first))

    def say_look(look: Look) -> None:
        say(look.do, "LOOK   ")
        say(f"at: {look.at}")
        for outcome in look.then:
            say(outcome, "     - ")

    notebooks = {failure.id: failure.notebook for failure in failures.all()}
    for cause in answer.causes:
        say(f"{' or '.join(cause.named)}: {cause.title}", "NAMED  ")
        for proof in cause.proofs:
            say(proof, "     + ")
        if cause.repair:
            say(f"repair: {cause.repair}")
        if notebooks.get(cause.named[0]):
            say(f"why: notebooks/{notebooks[cause.named[0]]}.ipynb")
        if cause.look:
            say_look(cause.look)
    told = {"SIGN   ": answer.signs, "Note: ": answer.notes, "read: ": answer.evidence.read}
    for first, parts in (told | {"not read: ": answer.evidence.not_read}).items():
        for part in parts:
            say(part, first)
    for number, look in enumerate(answer.looks):
        say(f"where that tells nothing: {look.do}") if number else say_look(look)
    return "\n".join([*lines, verdict(answer)])


def verdict(answer: Diagnosis) -> str:
    """Return one line that says what came of it."""
    named = ", ".join(" or ".join(cause.named) for cause in answer.causes)
    return f"{answer.run}: {'these files do not tell' if answer.abstained else named or 'nothing found'}."
