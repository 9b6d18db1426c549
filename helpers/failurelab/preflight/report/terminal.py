"""The answer of preflight as one screen."""

import re
import shutil
import textwrap

from failurelab import failures
from failurelab.preflight.answer import Answer, Finding, Verdict

_MOST_LINES = 40  # before the details
_MOST_CHANGED = 6  # lines of a diff in brief
_TITLES = {  # of what is no failure of the registry
    "given": "What the trainer is given is not what it takes",
    "callback": "A callback of the script's that raises",
    "evaluation": "An evaluation that cannot be made",
    "resume": "A checkpoint that training cannot go on from",
    "rate": "A learning rate that cannot teach, or teaches too much",
    "one row": "One prompt to train on",
    "first rewards": "What the untrained model gets",
}


def text(answer: Answer) -> str:
    """Return the answer as lines for a terminal: what is named and suspected, in 40 lines at most, then the details."""
    width = max(70, min(110, shutil.get_terminal_size().columns))
    whole = [_accusation(finding, width) for finding in answer.accusations]
    shown = whole
    if sum(len(lines) + 1 for lines in whole) > _MOST_LINES:
        shown = [_accusation(finding, width, brief=True) for finding in answer.accusations]
        while sum(len(lines) + 1 for lines in shown) >= _MOST_LINES:
            shown.pop()
    lines = [*answer.rewards.picture(width), ""] if answer.rewards else []
    lines += [line for accusation in shown for line in (*accusation, "")]
    if shown is not whole:
        more = ", ".join(finding.failure for finding in answer.accusations[len(shown) :])
        lines += [f"IN FULL{f', and beside these: {more}' * bool(more)}"]
        lines += [line for accusation in whole for line in (*accusation, "")]
    for heading, findings in (
        ("HELD (in brackets: what the same measurement said with the failure planted)", answer.held),
        ("NOT CHECKED", answer.not_checked),
        ("DOES NOT APPLY", answer.not_applicable),
    ):
        lines += [heading] * bool(findings)
        for finding in findings:
            said = finding.why or f"{finding.evidence} ({finding.control})"
            lines += _wrap(said, width, f"  {finding.failure:<6} ", " " * 9)
    if answer.cut:
        lines += _wrap(f"Cut: {'; '.join(answer.cut)}.", width, "")
    for note in answer.notes:
        lines += _wrap(f"Note: {note}.", width, "")
    if answer.error:
        lines += _wrap(f"ERROR {answer.error}", width, "")
    hidden = any(finding.hidden for finding in answer.named)
    if len(answer.named) > 1 or hidden or (answer.named and answer.ended_first and not answer.error):
        lines += _wrap(_chain(answer), width, "")
    return "\n".join([*lines, verdict(answer)])


def _accusation(finding: Finding, width: int, brief: bool = False) -> list[str]:
    """Return what is said of one failure that is named or suspected; in brief without what a reader can look up."""
    where = f"  ({finding.place})" if finding.place else ""
    suspected = finding.verdict is Verdict.SUSPECTED
    lines = [f"{finding.verdict.value}  {finding.failure} {title(finding.failure)}{where}"]
    tried = f"; with this repair: {finding.tried} (tried)" if finding.tried else ""
    if brief:
        lines += _wrap(textwrap.shorten(finding.evidence, 2 * width - 20, placeholder=" …"), width)
        lines += _wrap(textwrap.shorten(f"repair: {finding.repair}", width - 8, placeholder=" …"), width)
        changed = [line for line in finding.diff.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
        changed = changed if len(changed) <= _MOST_CHANGED else [*changed[: _MOST_CHANGED - 1], "…"]
        return lines + [f"         {line}" for line in changed]
    lines += _wrap(f"{finding.evidence}{tried}", width)
    lines += _wrap(f"not named: {finding.why}", width) if suspected else []
    if finding.repair:
        lines += _wrap(f"{'repair' if suspected else 'repair (tried)'}: {finding.repair}", width)
    lines += [f"         {line}" for line in finding.diff.splitlines()]
    return lines + (_wrap(f"why: notebooks/{finding.notebook}.ipynb", width) if finding.notebook else [])


def _chain(answer: Answer) -> str:
    """Return what hid behind what, in the order in which it was repaired."""
    parts = []
    for number, finding in enumerate(answer.named):
        repaired = ("", "with it repaired, ", "with both repaired, ")[number] if number < 3 else "with these repaired, "
        what = " ends the run" if not number and answer.ended_first and not answer.error else ""
        what = what or (" shows, which the first run hid" if finding.hidden else "")
        parts.append(f"{repaired}{finding.failure}{what}")
    last = "with it repaired" if len(parts) == 1 else "with both repaired" if len(parts) == 2 else "with all repaired"
    left = f"the script ends in an error: {answer.error}" if answer.error else (
        f"{', '.join(finding.failure for finding in answer.suspected)} is suspected" if answer.suspected
        else "nothing is found"
    )  # fmt: skip
    return f"In turn: {'; '.join(parts)}; {last}, {left}."


def verdict(answer: Answer) -> str:
    """Return one line that says what came of it."""
    parts = [
        f"{len(findings)} {word} ({', '.join(finding.failure for finding in findings)})"
        for findings, word in ((answer.named, "named"), (answer.suspected, "suspected"))
        if findings
    ]
    if parts:
        return f"{answer.script}: {', '.join(parts)}" + ("; the script ended in an error too." * bool(answer.error))
    if answer.error:
        return f"{answer.script}: could not be judged."
    left = f", {len(answer.not_checked)} not checked" if answer.not_checked else ""
    other = f", {len(answer.not_applicable)} do not apply" if answer.not_applicable else ""
    return f"{answer.script}: nothing found; {len(answer.held)} held{left}{other}."


def title(failure: str) -> str:
    """Return what a failure is called; empty where it has no title."""
    return (_TITLES | {known.id: known.title for known in failures.all()}).get(failure, "")


def _wrap(text: str, width: int, first: str = "       ", others: str = "") -> list[str]:
    others = others or first or "  "
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
