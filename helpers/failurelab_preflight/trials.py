"""What an edit changes: one measurement beside another, and which failures an edit heals.

An edit is a `Change`, whoever wrote it: the repair that a judge knows, or a patch of the user's. It heals a failure
that was accused before if the verdict after it is HELD (not unknown) and nothing else came. Repairs are tried
worst first, each on top of those that healed, up to four: what the first failure hid is judged behind its repair.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from failurelab_preflight.answer import Answer, Changed, Differences, rank
from failurelab_preflight.finding import Change, Finding, Verdict

ROUNDS = 4
# A repair may be seen by another judge than its failure: the whole gradient is the textbook's.
_HELD_BY = {"F15": ("F15", "F21"), "F20": ("F20", "F21"), "F3b": ("F3b", "F21")}
_BY_GOING_ON = ("release", "given")  # they end the script before its training, and are healed where it comes there
_SAME = 1e-6  # relative, between two figures
STILL = "it is still there with its repair"
NOT_AGAIN = "a second run without any change did not show it: the script does not do the same twice"
NO_EDIT = "no edit of the script undoes it, so it was not tried"
ROUNDS_OVER = f"{ROUNDS} repairs were made before this one's turn came"

Run = Callable[[Change], Answer]


def compare(before: Answer, after: Answer, again: Answer | None = None, what: str = "") -> Differences:
    """Return what is otherwise in one measurement than in the one before it.

    Args:
        before: without the edit.
        after: with it.
        again: a second one without it, if there is one: a figure that it changes too tells nothing of the edit.
        what: the edit, in words.
    """
    if after.error and after.error != before.error and not (before.error and after.findings):
        return Differences(what, error=after.error)
    there = [finding for finding in before.findings if finding.is_there]
    stayed = [finding.key for finding in there if _is_accused(finding, after)]
    left = [finding for finding in there if finding.key not in stayed]
    held = [finding.key for finding in left if _held(finding, after)]
    new = [finding for finding in after.accused if not _is_accused(finding, before)]
    known = {finding.failure for finding in (*before.held, *before.not_applicable)}
    words = {finding.failure for finding in new if finding.failure[0] != "F"}  # said of where there is something to say
    known |= set() if before.error else words
    came = [finding.key for finding in new if finding.failure in known]
    shown = [finding.key for finding in new if finding.key not in came]
    unclear = [finding.key for finding in left if came or finding.key not in held]
    return Differences(
        what, [] if came else held, unclear, came, shown, stayed, list(_changed(before, after, again or before))
    )


def _changed(before: Answer, after: Answer, again: Answer) -> Iterator[Changed]:
    old, new, second = (answer.quantities for answer in (before, after, again))
    for place in [*old, *(place for place in new if place not in old)]:
        values = [measured[place].value if place in measured else None for measured in (old, new, second)]
        if not _is_same(values[0], values[1]) and (place not in second or _is_same(values[0], values[2])):
            yield Changed(*place, values[0], values[1], (old.get(place) or new[place]).unit)


def _is_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_SAME) or (math.isnan(one) and math.isnan(other))


@dataclasses.dataclass(frozen=True)
class Trial:
    """What came of a failure that was measured.

    Attributes:
        finding: with its verdict: NAMED, or SUSPECTED with the reason.
        base: the repairs that were made before its own.
        change: `base` and its own repair, as it was run; None where there is none.
    """

    finding: Finding
    base: Change
    change: Change | None


class Rounds:
    """The runs of one script with the repairs of what was measured; until `try_all`, nothing is named.

    Args:
        run: runs the script with a change.
        first: what the run without any change reported.
        say: called with each stage.

    Attributes:
        named: failures, in the order in which they were repaired.
        last: the run with all repairs that healed.
        change: all repairs that healed.
        notes: more to know.
    """

    def __init__(self, run: Run, first: Answer, say: Callable[[str], None] = lambda stage: None):
        self._run, self.first, self.say = run, first, say
        self.change, self.last = Change(), first
        self._again: Answer | None = None  # a second run with `change`
        self.named: list[Trial] = []
        self.settled: dict[str, str] = {}  # the keys of failures that were not named, and why
        self.notes: list[str] = []

    def try_all(self) -> None:
        """Run the script again, with the repairs of what was measured, until nothing is left to repair.

        Raises:
            what `run` raises; what was known by then stays.
        """
        if not any(finding.changes or finding.tried for finding in self.first.found):
            self.settled.update((finding.key, NO_EDIT) for finding in self.first.found)
            return
        self.run_again()
        while len(self.named) < ROUNDS and self._try_one():
            pass

    def run_again(self) -> Answer:
        """Run the script a second time without any change; note where it said something else than the first time."""
        self.say("running again without any change")
        self._again = again = self._run(Change())
        once, twice = ({finding.key for finding in answer.found} for answer in (self.first, again))
        if once != twice or bool(self.first.error) != bool(again.error):
            keys = ", ".join(sorted(once ^ twice))
            said = f"{keys} came in one of them alone" if keys else again.error or "its error did not come again"
            self.notes.append(f"the script did not do the same in two runs without any change: {said}")
        return again

    def suspected(self, left: str = ROUNDS_OVER) -> list[Trial]:
        """Return failures that were not named, each with why; those whose turn did not come for the reason `left`."""
        suspected = [Trial(finding, Change(), None) for finding in self.last.suspected]
        still = {finding.key for finding in self.last.found}
        findings = [(finding, Change()) for finding in self.first.found if finding.key not in still]
        findings += [(finding, self.change) for finding in self.last.found]
        for finding, base in findings:
            if not self._is_named(finding) and (finding.key in self.settled or finding.key in still):
                why = self.settled.get(finding.key, left)
                finding = dataclasses.replace(finding, verdict=Verdict.SUSPECTED, why=why)
                change = None if why == STILL else next(iter(finding.changes), None)  # what does not heal is not shown
                suspected.append(Trial(finding, base, change))
        return suspected

    def _is_named(self, finding: Finding) -> bool:
        return any(trial.finding.key == finding.key for trial in self.named)

    def _try_one(self) -> bool:
        """Name the worst failure that can be; return whether there was one."""
        for finding in sorted(self.last.found, key=lambda candidate: (not candidate.ends, rank(candidate.failure))):
            if finding.key not in self.settled and not self._is_named(finding):
                if not (why := self._why_not(finding)):
                    return True
                self.settled[finding.key] = why
        return False

    def _why_not(self, finding: Finding) -> str:
        """Try a failure's repairs; name it and go on behind the first that heals, or return why it is not named."""
        if not finding.changes and not finding.tried:
            return NO_EDIT
        if self._again is None and not _is_accused(finding, self.first):  # what was hidden has to come twice too
            self._again = self._run(self.change)
        if self._again is not None and not _is_accused(finding, self._again):
            return NOT_AGAIN
        reasons = []
        for change in finding.changes:
            self.say(f"trying the repair of {finding.failure}")
            trial = self._run(change)
            reasons.append(_why_not_healed(finding, self.last, trial))
            if not reasons[-1]:
                gone = (other for other in self.last.found if other.key != finding.key and _held(other, trial))
                gone_with = f"gone with the repair of {finding.failure}"
                self.settled.update({other.key: gone_with for other in gone if not _is_accused(other, trial)})
                self._name(finding, finding.tried or _held(finding, trial), change)
                self.change, self.last, self._again = change, trial, None
                return ""
        if finding.tried:  # by the judge itself, in both runs, which needs no edit
            self._name(finding, finding.tried, None)
            return ""
        return reasons[0]

    def _name(self, finding: Finding, tried: str, change: Change | None) -> None:
        finding = dataclasses.replace(finding, verdict=Verdict.NAMED, tried=tried, round=len(self.named) + 1)
        self.named.append(Trial(finding, self.change, change))


def _why_not_healed(finding: Finding, before: Answer, after: Answer) -> str:
    """Return why a run with a repair does not show that it heals; empty if it does."""
    compared = compare(before, after)
    if compared.error:
        return f"its repair was not tried: with it the script ends in an error: {compared.error}"
    if finding.key in compared.stayed:
        return STILL
    if compared.came:
        return f"its repair brings {', '.join(compared.came)}, which was not there before"
    if finding.key in compared.healed or finding.tried:
        return ""
    return f"with its repair nothing was measured{': ' + after.error if after.error else ''}"


def _held(finding: Finding, answer: Answer) -> str:
    """Return what the judge of a failure says where it is gone, with the figure; empty if it has not measured it.

    What it holds of another part says nothing of this one. Where it still finds another part and nothing more of this
    one, neither the same fault nor another, it has measured both.
    """
    for failure in _HELD_BY.get(finding.failure, (finding.failure,)):
        for other in sorted(answer.held, key=lambda held: held.part != finding.part):
            if other.failure == failure and (not finding.part or other.part in ("", finding.part)):
                return other.evidence
    if finding.failure in _BY_GOING_ON and not answer.error:
        return "the script comes to its training"
    if not finding.part:
        return ""
    same = [other for other in answer.findings if other.failure == finding.failure]
    others = [other for other in same if other.part and other.part != finding.part and other in answer.found]
    silent = all(other.part != finding.part for other in same)
    return f"it is no longer said of {finding.part}" if others and silent else ""


def _is_accused(finding: Finding, answer: Answer) -> bool:
    """Whether a run speaks of the same thing: it was measured again, or is suspected of the whole script."""
    suspected = {other.key if finding.part else other.failure for other in answer.suspected}
    return finding.key in {*suspected, *(other.key for other in (*answer.found, *answer.named, *answer.noted))}
