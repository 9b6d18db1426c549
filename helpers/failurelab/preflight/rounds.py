"""Which of the failures that were measured are named: those that a repair takes away, and nothing else does.

The script runs once, and once more without any change. Then, worst first, it runs with the repair of one failure. That
failure is named if it came in both runs without the repair, if its judge says HELD in the run with it, and if it stays
when the repair of any other failure is made in its place. Then preflight goes on behind the repair, up to four times:
what the first failure hid is judged in the run with its repair.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from failurelab.preflight import repairs
from failurelab.preflight.report.answer import identity, rank

ROUNDS = 4
# A repair may be seen by another judge than its failure: the whole gradient is the textbook's.
_HELD_BY = {"F15": ("F15", "F21"), "F20": ("F20", "F21"), "F3b": ("F3b", "F21")}
NOT_AGAIN = "a second run without any change did not show it: the script does not do the same twice"
NO_EDIT = "no edit of the script undoes it, so it was not tried"
ROUNDS_OVER = f"{ROUNDS} repairs were made before this one's turn came"

Result = Mapping[str, Any]  # what a run reported
Run = Callable[[repairs.Change], Result]


class Rounds:
    """The runs of one script with repairs; until `try_all`, nothing is named.

    Args:
        run: runs the script with a change.
        first: what the run without any change reported.
        say: called with each stage.

    Attributes:
        named: failures, in the order in which they were repaired; each with `tried`, `round`, `change` and `base`.
        last: the run with all repairs that healed.
        change: all repairs that healed.
        notes: more to know.
    """

    def __init__(self, run: Run, first: Result, say: Callable[[str], None] = lambda stage: None):
        self._run, self.first, self.say = run, first, say
        self._known: dict[str, list[Result]] = {_key(repairs.Change()): [first]}  # the runs of each change
        self.change, self.last = repairs.Change(), first
        self.named: list[dict[str, Any]] = []
        self.settled: dict[tuple[str, ...], str] = {}  # failures that were not named, and why
        self._kept: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()  # a repair, and a failure that stays with it
        self.notes: list[str] = []

    def try_all(self) -> None:
        """Run the script again, with the repairs of what was measured, until nothing is left to repair.

        Raises:
            what `run` raises; what was known by then stays.
        """
        if not any(finding["changes"] or finding["tried"] for finding in self.first["findings"]):
            self.settled.update((identity(finding), NO_EDIT) for finding in self.first["findings"])
            return
        self.say("running again without any change")
        self._compare(self._again(self.change))
        while len(self.named) < ROUNDS and self._try_one():
            pass

    def suspected(self, left: str = ROUNDS_OVER) -> list[dict[str, Any]]:
        """Return failures that were not named, each with `why`; those whose turn did not come for the reason `left`."""
        suspected = [dict(entry) for entry in self.last["suspected"]]
        named = {identity(entry) for entry in self.named}
        still = {identity(each) for each in self.last["findings"]}
        findings = [(each, repairs.Change()) for each in self.first["findings"] if identity(each) not in still]
        findings += [(each, self.change) for each in self.last["findings"]]
        for finding, base in findings:
            about = identity(finding)
            if about not in named and (about in self.settled or about in still):
                suspected.append(_suspected(finding, self.settled.get(about, left), base))
        return suspected

    def hidden(self) -> list[str]:
        """Return what is named and the first run did not show, because another failure hid it."""
        seen = {identity(finding) for finding in self.first["findings"]}
        return [entry["failure"] for entry in self.named if identity(entry) not in seen]

    def _try_one(self) -> bool:
        """Name the worst failure that can be; return whether there was one."""
        for finding in sorted(self.last["findings"], key=lambda each: (not each["ends"], rank(each["failure"]))):
            if identity(finding) in self.settled or identity(finding) in map(identity, self.named):
                continue
            why = self._why_not(finding)
            if not why:
                return True
            self.settled[identity(finding)] = why
        return False

    def _why_not(self, finding: dict[str, Any]) -> str:
        """Try a failure's repair; name it and go on behind it, or return why it is not named."""
        without = self._known[_key(self.change)]
        if not finding["changes"] and not finding["tried"]:
            return NO_EDIT
        if len(without) < 2 and not _is_accused(finding, self.first):
            without = [*without, self._again(self.change)]
        if not all(_is_accused(finding, result) for result in without):
            return NOT_AGAIN
        reasons = [self._why_not_with(finding, change) for change in finding["changes"]]
        if "" in reasons:
            return ""
        if finding["tried"]:  # by the judge itself, in both runs, which needs no edit
            self._name({**finding, "changes": []}, finding["tried"], None)
            return ""
        return reasons[0]

    def _why_not_with(self, finding: dict[str, Any], change: Mapping[str, Any]) -> str:
        """Try one repair of a failure; name it and go on behind it, or return why it is not named."""
        if identity(finding) in map(identity, self.named):
            return "another repair heals it"
        trial = self._with_repair(finding, change, "trying the repair of {}")
        if why := _why_not_healed(finding, self.last, trial):
            return why
        for rival in self.last["findings"]:
            if identity(rival) == identity(finding) or (identity(rival), identity(finding)) in self._kept:
                continue
            for other in rival["changes"][:1]:
                result = self._with_repair(rival, other, "trying the repair of {} in its place")
                if other != change and not _why_not_healed(finding, self.last, result):
                    return f"the repair of {rival['failure']} takes it away too, so the two are not told apart"
        for other in self.last["findings"]:
            if identity(other) != identity(finding) and not _is_accused(other, trial) and _held(other, trial):
                self.settled[identity(other)] = f"gone with the repair of {finding['failure']}"
        self._name(finding, finding["tried"] or _held(finding, trial), change)
        self.change, self.last = repairs.from_json(change), trial
        return ""

    def _name(self, finding: dict[str, Any], tried: str, change: Mapping[str, Any] | None) -> None:
        base = repairs.to_json(self.change)
        self.named.append({**finding, "tried": tried, "round": len(self.named) + 1, "change": change, "base": base})

    def _with_repair(self, finding: dict[str, Any], change: Mapping[str, Any], stage: str) -> Result:
        """Run the script with a failure's repair too; note which of the others stay with it."""
        self.say(stage.format(finding["failure"]))
        result = self._once(repairs.from_json(change))
        self._kept |= {
            (identity(finding), identity(each)) for each in self.last["findings"] if _is_accused(each, result)
        }
        return result

    def _once(self, change: repairs.Change) -> Result:
        results = self._known.setdefault(_key(change), [])
        return results[0] if results else self._again(change)

    def _again(self, change: repairs.Change) -> Result:
        result = self._run(change)
        self._known.setdefault(_key(change), []).append(result)
        return result

    def _compare(self, again: Result) -> None:
        """Note where the second run without any change said something else than the first."""
        once, twice = ({identity(finding) for finding in result["findings"]} for result in (self.first, again))
        if once != twice or bool(self.first["error"]) != bool(again["error"]):
            ids = ", ".join(sorted({failure for failure, *_ in once ^ twice}))
            said = f"{ids} came in one of them alone" if ids else again["error"] or "its error did not come again"
            self.notes.append(f"the script did not do the same in two runs without any change: {said}")


def _why_not_healed(finding: dict[str, Any], before: Result, trial: Result) -> str:
    """Return why a run with a change does not show that it heals; empty if it does."""
    if trial["error"] and not before["error"]:
        return f"its repair was not tried: with it the script ends in an error: {trial['error']}"
    if _is_accused(finding, trial):
        return "it is still there with its repair"
    if not _held(finding, trial) and not finding["tried"]:
        return f"with its repair nothing was measured{': ' + trial['error'] if trial['error'] else ''}"
    held = {answer["failure"] for answer in before["held"]} - {each["failure"] for each in before["findings"]}
    new = [each["failure"] for each in trial["findings"] if each["failure"] in held]
    return f"its repair brings {', '.join(new)}, which was not there before" if new else ""


def _held(finding: dict[str, Any], result: Result) -> str:
    """Return what the judge of a failure says where it is gone, with the figure; empty if it has not measured it."""
    for failure in _HELD_BY.get(finding["failure"], (finding["failure"],)):
        for answer in result["held"]:
            if answer["failure"] == failure:
                return answer["evidence"]
    others = [each for each in result["findings"] if each["failure"] == finding["failure"] and each["about"]]
    return f"it is no longer said of {finding['about']}" if finding["about"] and others else ""


def _is_accused(finding: dict[str, Any], result: Result) -> bool:
    speaks = {each["failure"] for each in result["suspected"]} if not finding["about"] else ()
    return identity(finding) in map(identity, result["findings"]) or finding["failure"] in speaks


def _key(change: repairs.Change) -> str:
    return json.dumps(repairs.to_json(change), sort_keys=True)


def _suspected(finding: dict[str, Any], why: str, base: repairs.Change) -> dict[str, Any]:
    """Return a failure that is not named, with its first repair, and the change on top of which that was made."""
    return {**finding, "why": why, "change": next(iter(finding["changes"]), None), "base": repairs.to_json(base)}
