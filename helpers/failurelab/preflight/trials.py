"""Which of the failures that were measured are named: those that a repair takes away, and nothing else does.

The script runs once, and once more without any change. Then, worst first, it runs with the repair of one failure. That
failure is named if it came in both runs without the repair, if its judge says HELD in the run with it, and if it stays
when the repair of any other failure is made in its place. Then preflight goes on behind the repair, up to four times:
what the first failure hid is judged in the run with its repair.
"""

import dataclasses
from collections.abc import Callable

from failurelab.preflight.answer import Answer, Change, Finding, Verdict, rank

ROUNDS = 4
# A repair may be seen by another judge than its failure: the whole gradient is the textbook's.
_HELD_BY = {"F15": ("F15", "F21"), "F20": ("F20", "F21"), "F3b": ("F3b", "F21")}
_BY_GOING_ON = ("release", "given")  # they end the script before its training, and are healed where it comes there
STILL = "it is still there with its repair"
NOT_AGAIN = "a second run without any change did not show it: the script does not do the same twice"
NO_EDIT = "no edit of the script undoes it, so it was not tried"
ROUNDS_OVER = f"{ROUNDS} repairs were made before this one's turn came"

Run = Callable[[Change], Answer]


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
    """The runs of one script with repairs; until `try_all`, nothing is named.

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
        self._known: list[tuple[Change, list[Answer]]] = [(Change(), [first])]  # the runs of each change
        self.change, self.last = Change(), first
        self.named: list[Trial] = []
        self.settled: dict[str, str] = {}  # the keys of failures that were not named, and why
        self._kept: set[tuple[str, str]] = set()  # the keys of a repaired failure, and of one that stays with it
        self.notes: list[str] = []

    def try_all(self) -> None:
        """Run the script again, with the repairs of what was measured, until nothing is left to repair.

        Raises:
            what `run` raises; what was known by then stays.
        """
        if not any(finding.changes or finding.tried for finding in self.first.found):
            self.settled.update((finding.key, NO_EDIT) for finding in self.first.found)
            return
        self.say("running again without any change")
        self._compare(self._again(self.change))
        while len(self.named) < ROUNDS and self._try_one():
            pass

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
            if finding.key in self.settled or self._is_named(finding):
                continue
            why = self._why_not(finding)
            if not why:
                return True
            self.settled[finding.key] = why
        return False

    def _why_not(self, finding: Finding) -> str:
        """Try a failure's repair; name it and go on behind it, or return why it is not named."""
        without = self._runs_of(self.change)
        if not finding.changes and not finding.tried:
            return NO_EDIT
        if len(without) < 2 and not _is_accused(finding, self.first):
            without = [*without, self._again(self.change)]
        if not all(_is_accused(finding, answer) for answer in without):
            return NOT_AGAIN
        reasons = [self._why_not_with(finding, change) for change in finding.changes]
        if "" in reasons:
            return ""
        if finding.tried:  # by the judge itself, in both runs, which needs no edit
            self._name(finding, finding.tried, None)
            return ""
        return reasons[0]

    def _why_not_with(self, finding: Finding, change: Change) -> str:
        """Try one repair of a failure; name it and go on behind it, or return why it is not named."""
        if self._is_named(finding):
            return "another repair heals it"
        trial = self._with_repair(finding, change, "trying the repair of {}")
        if why := _why_not_healed(finding, self.last, trial):
            return why
        for rival in self.last.found:
            if rival.key == finding.key or (rival.key, finding.key) in self._kept:
                continue
            for other in rival.changes[:1]:
                answer = self._with_repair(rival, other, "trying the repair of {} in its place")
                if other != change and not _why_not_healed(finding, self.last, answer):
                    return f"the repair of {rival.failure} takes it away too, so the two are not told apart"
        for rival in self.last.found:
            if rival.key != finding.key and not _is_accused(rival, trial) and _held(rival, trial):
                self.settled[rival.key] = f"gone with the repair of {finding.failure}"
        self._name(finding, finding.tried or _held(finding, trial), change)
        self.change, self.last = change, trial
        return ""

    def _name(self, finding: Finding, tried: str, change: Change | None) -> None:
        hidden = finding.key not in {other.key for other in self.first.found}
        turn = len(self.named) + 1
        finding = dataclasses.replace(finding, verdict=Verdict.NAMED, tried=tried, round=turn, hidden=hidden)
        self.named.append(Trial(finding, self.change, change))

    def _with_repair(self, finding: Finding, change: Change, stage: str) -> Answer:
        """Run the script with a failure's repair too; note which of the others stay with it."""
        self.say(stage.format(finding.failure))
        answer = next(iter(self._runs_of(change)), None) or self._again(change)
        self._kept |= {(finding.key, other.key) for other in self.last.found if _is_accused(other, answer)}
        return answer

    def _runs_of(self, change: Change) -> list[Answer]:
        for known, answers in self._known:
            if known == change:
                return answers
        self._known.append((change, []))
        return self._known[-1][1]

    def _again(self, change: Change) -> Answer:
        answer = self._run(change)
        self._runs_of(change).append(answer)
        return answer

    def _compare(self, again: Answer) -> None:
        """Note where the second run without any change said something else than the first."""
        once, twice = ({finding.key for finding in answer.found} for answer in (self.first, again))
        if once != twice or bool(self.first.error) != bool(again.error):
            keys = ", ".join(sorted(once ^ twice))
            said = f"{keys} came in one of them alone" if keys else again.error or "its error did not come again"
            self.notes.append(f"the script did not do the same in two runs without any change: {said}")


def _why_not_healed(finding: Finding, before: Answer, trial: Answer) -> str:
    """Return why a run with a change does not show that it heals; empty if it does."""
    if trial.error and not before.error:
        return f"its repair was not tried: with it the script ends in an error: {trial.error}"
    if _is_accused(finding, trial):
        return STILL
    if not _held(finding, trial) and not finding.tried:
        return f"with its repair nothing was measured{': ' + trial.error if trial.error else ''}"
    held = {other.failure for other in before.held} - {other.failure for other in before.found}
    new = [other.failure for other in trial.found if other.failure in held]
    return f"its repair brings {', '.join(new)}, which was not there before" if new else ""


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
    return finding.key in {*suspected, *(other.key for other in answer.found)}
