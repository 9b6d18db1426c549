"""The answer of diagnose: one screen, and JSON."""

import dataclasses
import shutil
import textwrap
from typing import Any

from failurelab import _issue, failures
from failurelab.diagnose import rules
from failurelab.diagnose.evidence import Evidence

PREFLIGHT = (
    "failurelab preflight SCRIPT, or name the script beside the run: it runs the script, cut to seconds, calls its "
    "reward functions, and watches three steps"
)
FILES = {  # that tell more, by kind
    "history": "trainer_state.json",
    "log": "the log",
    "rows": "logged completions (log_completions=True) beside the right answers",
    "weights": "two checkpoints of different steps",
    "versions": "pip freeze",
    "guards": "a run with guards, which leaves failurelab.json",
}
_ASKS_FOR = {"two checkpoints": "weights", "look at logged completions": "rows"}  # how a probe begins, by kind of file
_SHOWN = 4  # causes on the screen


@dataclasses.dataclass
class Answer:
    """What is told of one run.

    Attributes:
        run: its name.
        causes: those that are named, then those that are suspected, likeliest first.
        healthy: nothing that the rules know is wrong with it.
        abstained: something is, or may be, and the files do not tell what.
        signs: what shows that something is wrong.
        probe: the one thing to look at next, where it abstained.
        notes: lines that say how far this goes.
        evidence: what it rests on.
    """

    run: str
    causes: list[rules.Cause]
    healthy: bool
    abstained: bool
    signs: list[str]
    probe: str
    notes: list[str]
    evidence: Evidence

    @property
    def exit_status(self) -> int:
        """0 for a healthy run, 1 where a cause is named, 3 where not."""
        return 0 if self.healthy else 3 if self.abstained else 1


def decide(evidence: Evidence) -> Answer:
    """Name what the files prove, or abstain where something is or may be wrong, or find nothing."""
    known = evidence.figures
    causes, signs = rules.judge(known)
    history = evidence.history
    notes: list[str] = []
    if history is not None and history.trainer:
        proofs = ("error", "preflight_found", "guard_found")  # a rule about GRPO's curves proves nothing here
        causes = [cause for cause in causes if any(f"{proof}_{cause.failure}" in known for proof in proofs)]
        notes.append(
            f"the log is of {history.trainer} training, and the rules are about GRPO: only its errors were looked up"
        )
    named = any(cause.named for cause in causes)
    abstained = not named and bool(history is None or history.trainer or signs)
    probe = ""
    if abstained:
        probe = _choose_probe(causes, known, evidence.kinds)
        if history is None or history.trainer:
            probe = "the trainer_state.json of the GRPO run, or its log: without figures no run can be called healthy"
    elif not named:
        causes = []
        notes += _limits(known)
    return Answer(evidence.name, causes, not (named or abstained), abstained, signs, probe, notes, evidence)


def _choose_probe(causes: list[rules.Cause], known: dict[str, Any], kinds: set[str]) -> str:
    """Preflight, which runs the script, where it was not asked; then what else tells and was not handed in."""
    asked = [begin for begin, kind in _ASKS_FOR.items() if kind in kinds]
    probes = [cause.probe for cause in causes if not cause.probe.startswith(tuple(asked))]
    if not known["preflight_read"]:
        return f"{PREFLIGHT}. Or: {probes[0]}" if probes else PREFLIGHT
    more = [what for kind, what in FILES.items() if kind not in kinds]
    if probes and causes[0].failure not in ("F10", "F14"):
        return probes[0]
    if more:
        return f"what preflight cannot see, the run itself tells: {', or '.join(more)}"
    return "a few steps on prompts that the model is known to solve: if the reward rises there, the task is hard"


def _limits(known: dict[str, Any]) -> list[str]:
    if known.get("steps_seen", 0) < 40 or known.get("entries", 0) < 6:
        seen = f"{known.get('entries', 0)} entries over {known.get('steps_seen', 0):g} steps"
        return [f"{seen} are too few to say whether it learns"]
    if known.get("reward_course") == "flat":
        return [f"the reward stays near its highest value, {known['reward_mean']:.3g}"]
    return []


def to_json(answer: Answer) -> dict[str, Any]:
    """Return the answer as JSON can hold it."""
    return {
        "causes": [
            {
                "failure": cause.failure,
                "title": cause.title,
                "named": list(cause.named),
                "for": cause.pro,
                "against": cause.contra,
                "probe": cause.probe,
                "from_step": cause.from_step,
            }
            for cause in answer.causes
        ],
        "healthy": answer.healthy,
        "abstained": answer.abstained,
        "run": answer.run,
        "signs": answer.signs,
        "probe": answer.probe,
        "notes": answer.notes,
        "read": answer.evidence.read,
        "not_read": answer.evidence.not_read,
    }


def text(answer: Answer) -> str:
    """Return the answer as lines for a terminal."""
    width = max(70, min(110, shutil.get_terminal_size().columns))
    lines = []
    notebooks = {failure.id: failure.notebook for failure in failures.all()}
    for cause in answer.causes[:_SHOWN]:
        word = "NAMED" if cause.named else "SUSPECTED"
        ids = " or ".join(cause.named) or cause.failure
        lines += _wrap(f"{ids}: {cause.title}", width, f"{word}  ")
        if cause.from_step is not None and cause.named:
            lines += _wrap(f"from step {cause.from_step:g} on", width)
        lines += [line for part in cause.pro for line in _wrap(part, width, "     + ")]
        lines += [line for part in cause.contra for line in _wrap(part, width, "     - ")]
        if len(cause.named) == 1 and cause.repair:
            lines += _wrap(f"repair: {cause.repair}", width)
        if cause.named and notebooks.get(cause.failure):
            lines += _wrap(f"why: notebooks/{notebooks[cause.failure]}.ipynb", width)
        if len(cause.named) != 1:
            lines += _wrap(f"would tell: {cause.probe}", width)
    left = answer.causes[_SHOWN:]
    if left:
        lines += _wrap(f"less likely: {', '.join(cause.failure for cause in left)}", width, "")
    if answer.abstained:
        lines += [line for sign in answer.signs for line in _wrap(sign, width, "SIGN   ")]
    lines += [line for note in answer.notes for line in _wrap(note, width, "Note: ")]
    lines += [line for name in answer.evidence.read for line in _wrap(name, width, "read: ")]
    lines += [line for why in answer.evidence.not_read for line in _wrap(why, width, "not read: ")]
    if answer.abstained:
        lines += _wrap(answer.probe, width, "NEXT   ")
    return "\n".join([*lines, *_wrap(verdict(answer), width, "")])


def report(answer: Answer) -> str:
    """Return the answer as Markdown for an issue: ids, what the rules say of them, and what was not handed in."""
    parts: list[tuple[str, list[str]]] = []
    for cause in answer.causes:
        lines = [f"- {'named' if cause.named else 'suspected'}"]
        if cause.named and cause.from_step is not None:
            lines.append(f"- from step {cause.from_step:g} on")
        lines += [f"- repair: {cause.repair}" if len(cause.named) == 1 and cause.repair else f"- probe: {cause.probe}"]
        parts.append((f"{' or '.join(cause.named) or cause.failure} {cause.title}", lines))
    missing = [f"- {what}" for kind, what in FILES.items() if kind not in answer.evidence.kinds]
    parts.append(("Not handed in, so not checked", missing))
    said = verdict(answer).removeprefix(f"{answer.run}: ")
    return _issue.markdown(f"failurelab diagnose: {said}", answer.evidence.versions, parts)


def verdict(answer: Answer) -> str:
    """Return one line that says what came of it."""
    if answer.healthy:
        return f"{answer.run}: nothing found."
    if not answer.abstained:
        named = [" or ".join(cause.named) for cause in answer.causes if cause.named]
        return f"{answer.run}: {', '.join(named)}."
    possible = ", ".join(cause.failure for cause in answer.causes[:_SHOWN])
    return f"{answer.run}: these files do not tell{f'; suspected: {possible}' if possible else ''}."


def _wrap(text: str, width: int, first: str = "       ") -> list[str]:
    rest = " " * len(first) if first.strip() else "       "
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
