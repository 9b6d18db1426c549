"""The answer of preflight as one screen."""

import pathlib
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence

from failurelab import failures
from failurelab.failures import atlas
from failurelab.preflight.answer import Answer, Finding, Location, Verdict
from failurelab.preflight.report.words import speak

_MOST_LINES = 40  # before the details
_MOST_CHANGED = 6  # lines of a diff in brief
_TITLES = {  # of what is no failure of the registry: a short name, and a title
    "release": ("missing name", "A name that the installed release does not have"),
    "given": ("wrong argument", "What the trainer is given is not what it takes"),
    "override": ("override", "An override that changes nothing"),
    "callback": ("callback", "A callback of the script's that raises, stops the training or undoes it"),
    "evaluation": ("evaluation", "An evaluation that cannot be made, or chooses otherwise"),
    "weights": ("weights", "Weights that the model does not take, or that are not the trained ones"),
    "resume": ("checkpoint", "A checkpoint that training cannot go on from"),
    "arguments": ("loss's options", "Arguments that leave no gradient, turn it, or plan no step"),
    "rate": ("learning rate", "A learning rate that cannot teach, or teaches too much"),
    "rows": ("prompts and answers", "Prompts and answers that do not belong together"),
    "one row": ("one prompt", "One prompt to train on"),
    "first rewards": ("untrained model", "What the untrained model gets"),
}


_HELD = "HELD: looked for, and not there (in brackets: the same measurement with the failure put in on purpose)"
_HELD_REPAIRED = (
    "HELD, with the repairs above: looked for, and not there (in brackets: the same measurement with the failure put "
    "in on purpose)"
)


def text(answer: Answer, language: str = "en") -> str:
    """Return the answer as lines for a terminal: what is named and suspected, in 40 lines at most, then the details."""
    width = max(70, min(110, shutil.get_terminal_size().columns))
    say = speak(language)
    lines = [*answer.rewards.picture(width, say), ""] if answer.rewards else []
    room = _MOST_LINES - len(lines)
    whole = [_accusation(finding, width, language) for finding in answer.accusations]
    shown = whole
    if sum(len(accusation) + 1 for accusation in whole) > room:
        shown = [_accusation(finding, width, language, brief=True) for finding in answer.accusations]
        while len(shown) > 1 and sum(len(accusation) + 1 for accusation in shown) >= room:
            shown.pop()
    lines += [line for accusation in shown for line in (*accusation, "")]
    if shown is not whole:
        more = _names(answer.accusations[len(shown) :], say)
        lines += [say("IN FULL") + (say(", and beside these: {}", more) if more else "")]
        lines += [line for accusation in whole for line in (*accusation, "")]
    for heading, findings in (
        ("NOT CHECKED", answer.not_checked),  # first: a person may know what these ask
        (_HELD_REPAIRED if answer.named else _HELD, answer.held),
        ("DOES NOT APPLY", answer.not_applicable),
    ):
        lines += _wrap(say(heading), width, "", "  ") if findings else []
        for finding in findings:
            said = finding.why or f"{finding.evidence} ({finding.control})"
            lines += _wrap(f"{_subject(finding.failure, language)} – {said}", width, "  ", " " * 9)
    if answer.cut:
        lines += _wrap(say("Cut: {}.", "; ".join(answer.cut)), width, "")
    own = {finding.failure for finding in answer.accusations if finding.own}
    measured = atlas.cite(answer.versions, own) if answer.accusations else ""
    known = [say("what these releases have in some settings (docs/atlas.md): {}", measured)] if measured else []
    for note in [*answer.notes, *known]:
        lines += _wrap(say("Note: {}.", note), width, "")
    if answer.error:
        lines += _wrap(say("ERROR {}", answer.error), width, "")
    hidden = any(finding.hidden for finding in answer.named)
    if len(answer.named) > 1 or hidden or (answer.named and answer.ended_first and not answer.error):
        lines += _wrap(_chain(answer, say), width, "")
    return "\n".join([*lines, verdict(answer, language)])


def _accusation(finding: Finding, width: int, language: str, brief: bool = False) -> list[str]:
    """Return what is said of one failure that is named or suspected; in brief without what a reader can look up."""
    say = speak(language)
    where = f"  ({_place(finding.place, say)})" if finding.place else ""
    suspected = finding.verdict is Verdict.SUSPECTED
    named = f"{finding.failure} " * (finding.failure not in _TITLES)
    lines = [f"{say(finding.verdict.value)}  {named}{title(finding.failure, language)}{where}"]
    evidence = finding.evidence
    edited = bool(finding.diff)  # else the judge has tried it beside the script: other rows, another completion
    if finding.tried:
        words = "{}; with this repair: {} (tried)" if edited else "{}; tried beside it: {}"
        evidence = say(words, evidence.rstrip("."), finding.tried)
    if brief:
        lines += _wrap(textwrap.shorten(finding.evidence, 2 * width - 20, placeholder=" …"), width)
        lines += _wrap(textwrap.shorten(say("repair: {}", finding.repair), width - 8, placeholder=" …"), width)
        changed = [line for line in finding.diff.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
        if len(changed) > _MOST_CHANGED:
            taken_out = all(line.startswith("-") for line in changed)
            few = [*changed[: _MOST_CHANGED - 1], "…"]
            changed = [say("(the edit takes out {} lines, see below)", len(changed))] if taken_out else few
        return lines + [f"         {line}" for line in changed]
    lines += _wrap(evidence, width)
    lines += _wrap(say("not named: {}", finding.why), width) if suspected else []
    if finding.repair:
        lines += _wrap(say("repair (tried): {}" if edited and not suspected else "repair: {}", finding.repair), width)
    lines += [f"         {line}" for line in finding.diff.splitlines()]
    page = f"docs/{'zh/' * (language == 'zh')}symptoms.md#{finding.failure.lower()}" * bool(named)
    more = ", ".join(filter(None, (finding.notebook and f"notebooks/{finding.notebook}.ipynb", page)))
    return lines + (_wrap(say("why: {}", more), width) if more else [])


def _place(place: Location, say: Callable[..., str]) -> str:
    at = say("cell {}, line {}", place.cell, place.line) if place.cell else say("line {}", place.line)
    return f"{pathlib.PurePath(place.file).name}, {at}"


def _chain(answer: Answer, say: Callable[..., str]) -> str:
    """Return what hid behind what, in the order in which it was repaired."""
    parts = []
    for number, finding in enumerate(answer.named):
        what = name(finding.failure, say)
        if not number and answer.ended_first and not answer.error:
            what = say("{} ends the run", what)
        elif finding.hidden:
            what = say("{} shows, which the first run hid", what)
        before = ("{}", "with it repaired, {}", "with both repaired, {}")
        parts.append(say(before[number] if number < 3 else "with these repaired, {}", what))
    suspected = _names(answer.suspected, say)
    left = say("the script ends in an error: {}", answer.error) if answer.error else (
        say("{} is suspected", suspected) if suspected else say("nothing is found")
    )  # fmt: skip
    last = ("with it repaired, {}", "with both repaired, {}", "with all repaired, {}")[min(len(parts), 3) - 1]
    return say("In turn: {}.", "; ".join([*parts, say(last, left)]))


def verdict(answer: Answer, language: str = "en") -> str:
    """Return one line that says what came of it."""
    say = speak(language)
    parts = [
        say(words, len(findings), _names(findings, say))
        for findings, words in ((answer.named, "{} named ({})"), (answer.suspected, "{} suspected ({})"))
        if findings
    ]
    if parts:
        said = say(", ").join(parts) + say("; the script ended in an error too.") * bool(answer.error)
    elif answer.error:
        said = say("could not be judged.")
    else:
        said = say("nothing found; {} held", len(answer.held))
        asked = _names(answer.not_checked, say)
        said += say(", {} not checked ({})", len(answer.not_checked), asked) if answer.not_checked else ""
        said += say(", {} do not apply", len(answer.not_applicable)) if answer.not_applicable else ""
        said += say(".")
    return say("{}: {}", answer.script, said)


def name(failure: str, say: Callable[..., str] = str.format) -> str:
    """Return a failure's id, or a short name of what is no failure of the registry."""
    return say(_TITLES[failure][0]) if failure in _TITLES else failure


def _subject(failure: str, language: str) -> str:
    """Return a failure's id with its title, or the short name of what is none."""
    return f"{failure} {title(failure, language)}" if failure not in _TITLES else name(failure, speak(language))


def _names(findings: Sequence[Finding], say: Callable[..., str]) -> str:
    return ", ".join(name(finding.failure, say) for finding in findings)


def title(failure: str, language: str = "en") -> str:
    """Return what a failure is called; empty where it has no title."""
    if failure in _TITLES:
        return speak(language)(_TITLES[failure][1])
    known = next((known for known in failures.all() if known.id == failure), None)
    return "" if known is None else known.title_zh if language == "zh" else known.title


def _wrap(text: str, width: int, first: str = "       ", others: str = "") -> list[str]:
    others = others or first or "  "
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
