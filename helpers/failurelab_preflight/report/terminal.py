"""The answer of preflight as a sheet of some thirty lines, and whole with `--all`."""

import itertools
import pathlib
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence

from failurelab import failures
from failurelab.failures import atlas, figures
from failurelab_preflight.answer import Answer, Changed, Differences
from failurelab_preflight.finding import SCRIPT, Finding, Location, Quantity, Verdict
from failurelab_preflight.report.words import speak

_MOST_LINES = 5  # of one finding
_WHOLE = 3  # findings that have as many; of the others one line each
_MOST_FIGURES = 8  # that are others; --json has all
_TITLES = {  # of what is no failure of the registry: a short name, and a title
    "release": ("missing name", "A name that the installed release does not have"),
    "given": ("wrong argument", "What the trainer is given is not what it takes"),
    "callback": ("callback", "A callback of the script's that raises, stops the training or undoes it"),
    "cut": ("the cut", "An error that what was cut may have made"),
}
# What each instrument looks at; what is in none of them is told as not looked at.
_INSTRUMENTS = {
    "draws and rows": ("F7", "F11", "F12", "F13", "F16", "F17", "F18", "F22"),
    "reward table": ("F10", "F14"),
    "step": ("F3b", "F15", "F20", "F21"),
    "model": ("F1", "F2", "F3a", "F5", "F8", "F9", "F19", "F23"),
    "libraries": ("F4", "F6", "release", "given", "cut", "callback"),
}
Say = Callable[..., str]


def text(answer: Answer, language: str = "en", everything: bool = False) -> str:
    """Return the answer as lines for a terminal: the sheet, or with it all that was measured."""
    width = max(70, min(110, shutil.get_terminal_size().columns))
    say = speak(language)
    lines = [*_comparison(answer.compared, width, say), ""] if answer.compared else []
    lines += _wrap(verdict(answer, language), width, "")
    if answer.error:
        lines += _wrap(say("ERROR {}", answer.error), width, "")
    for finding in answer.ended_by_cut:
        lines += _wrap(f"{say(finding.verdict.value)}  {finding.why}", width, "")
    if answer.in_force:
        lines += ["", say("In force")]
        for setting in answer.in_force:
            given = say(" (given: {})", setting.given) if setting.given else ""
            lines += _wrap(f"{say(setting.name):<14}{setting.value}{given}", width, "  ", " " * 16)
    for place, finding in enumerate([*answer.accusations, *answer.noted]):
        if everything or (place < _WHOLE and finding.accuses):
            lines += ["", *_failure(finding, width, language, everything)]
        else:
            lines.append(_heading(finding, language))
    lines += ["", *_instruments(answer, width, say)]
    if everything:
        return "\n".join([*lines, *_details(answer, width, language)]).rstrip()
    left = [say("{} notes", len(answer.notes))] * bool(answer.notes) + [say("{} cuts", len(answer.cut))] * bool(
        answer.cut
    )
    left += [say("what each reward function pays")] * bool(answer.rewards and answer.rewards.lines)
    return "\n".join([*lines, *(_wrap(say("--all has the rest: {}", "; ".join(left)), width, "") if left else [])])


def _comparison(compared: Differences, width: int, say: Say) -> list[str]:
    """Return what an edit changes: verdicts, and figures before and after."""
    if compared.error:
        return _wrap(say("NOT TRIED {}: {}", compared.what, compared.error), width, "")
    told = (
        ("healed by this edit", compared.healed), ("came", compared.came),
        ("shows now, and was not measured before", compared.shown),
        ("stayed", compared.stayed), ("gone, and not healed: nothing holds it, or something came", compared.unclear),
    )  # fmt: skip
    said = [f"{say(words)}: {', '.join(keys)}" for words, keys in told if keys]
    lines = _wrap(f"{compared.what}: {'; '.join(said) or say('no failure came or went')}", width, "")
    for changed in compared.figures[:_MOST_FIGURES]:
        lines += _wrap(_changed(changed), width, "  ")
    left = len(compared.figures) - _MOST_FIGURES
    lines += [say("  and {} more figures (--json has all)", left)] if left > 0 else []
    return lines if compared.figures else [*lines, say("  no figure is another one")]


def _changed(changed: Changed) -> str:
    before, after = ("?" if value is None else f"{value:.6g}" for value in (changed.before, changed.after))
    unit = f" {changed.unit}" if changed.unit not in ("", "yes or no") else ""
    return f"{changed.place} {changed.name}: {before} -> {after}{unit}".strip()


def verdict(answer: Answer, language: str = "en") -> str:
    """Return one line that says what came of it, and of the worst what it does and what makes it."""
    say = speak(language)
    parts = [
        say(words, len(findings), _names(findings, say))
        for findings, words in ((answer.named, "{} named ({})"), (answer.suspected, "{} suspected ({})"))
        if findings
    ]
    worst = answer.accusations[0] if parts else None
    if worst and answer.error and worst.harm != "blocks":  # the error is what blocks
        said = say(", ").join([say("ended early, by the error below"), *parts]) + say(".")
    elif worst:
        known = say(", ").join(say(word) for word in (worst.harm, worst.origin) if word)
        said = say(", ").join(parts) + (say("; the worst: {} ({})", name(worst.failure, say), known) if known else "")
        said += say("; the script ended in an error too.") * bool(answer.error)
        said += say("; what was cut ended the run.") * bool(answer.ended_by_cut)
    elif answer.error or answer.ended_by_cut:
        said = say("could not be judged.")
    else:
        said = say("nothing found; {} held in these steps", len(answer.held))
        asked = _names(answer.not_checked, say)
        said += say(", {} not checked ({})", len(answer.not_checked), asked) if answer.not_checked else ""
        said += say(", {} do not apply", len(answer.not_applicable)) if answer.not_applicable else ""
        said += say(", {} noted ({})", len(answer.noted), _names(answer.noted, say)) if answer.noted else ""
        said += say(".")
    return say("{}: {}", answer.script, said)


def _failure(finding: Finding, width: int, language: str, everything: bool) -> list[str]:
    """Return what is said of a failure: in five lines at most its figures, the edit, and what the answer hangs on.

    No sentence is cut off: what does not fit whole is left to `--all`.
    """
    say = speak(language)
    named, edited = finding.failure not in _TITLES, finding.verdict is Verdict.NAMED and bool(finding.diff)
    edits = [line for line in finding.diff.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    page = f"docs/{'zh/' * (language == 'zh')}symptoms.md#{finding.failure.lower()}" * named
    more = ", ".join(filter(None, (finding.notebook and f"notebooks/{finding.notebook}.ipynb", page)))
    repair = finding.repair and say("repair (tried): {}" if edited else "repair: {}", finding.repair)
    told = [
        "; ".join(_figure(figure, say) for figure in finding.figures),
        say("hangs on: {}", finding.why) if finding.verdict is Verdict.SUSPECTED else "",
        # without an edit the judge has tried it beside the script: other rows, another completion
        finding.tried and say("with this repair: {} (tried)" if edited else "tried beside it: {}", finding.tried),
    ]
    lines = [_heading(finding, language)]
    if everything:
        for words in (*told, finding.evidence, repair, *finding.diff.splitlines(), more and say("why: {}", more)):
            lines += [f"         {words}"] if words in finding.diff.splitlines() else _wrap(words, width)
        return lines
    for words in (*told, "  ".join(edits) if 0 < len(edits) < 3 else repair, finding.evidence):
        parts = re.split(r"(?<=[.;:]) (?![^(]*\))", words) if words else []
        whole = (_wrap(" ".join(parts[:count]).rstrip(";:"), width) for count in range(len(parts), 0, -1))
        lines += next((some for some in whole if len(some) <= _MOST_LINES - len(lines)), [])
    return lines


def _figure(figure: Quantity, say: Say) -> str:
    known = figures.table().get(figure.name)
    band = f"{known.healthy}".removeprefix(figure.name).strip() if known and known.healthy else ""
    of = say(" of {}", f"{figure.scale:g}") if figure.scale is not None else ""
    unit = f" {figure.unit}" * bool(figure.unit)
    return f"{figure.name} {figure.value:.4g}{of}{unit}" + (say(" (healthy: {})", band) if band else "")


def _instruments(answer: Answer, width: int, say: Say) -> Iterator[str]:
    """Yield a line for each instrument, and one for what none of them has looked at."""
    looked = {finding.failure for finding in answer.findings}
    for instrument, ids in _INSTRUMENTS.items():
        said = []
        for words, some in (
            ("found {}", answer.accusations), ("noted {}", answer.noted), ("held {}", answer.held),
            ("not checked {}", answer.not_checked), ("does not apply {}", answer.not_applicable),
        ):  # fmt: skip
            its = dict.fromkeys(finding.failure for finding in some if finding.failure in ids)
            said += [say(words, ", ".join(name(each, say) for each in its))] if its else []
        if said:
            yield from _wrap(f"{say(instrument):<16}{'; '.join(said)}", width, "", " " * 16)
    left = ", ".join(failure.id for failure in failures.all() if failure.id not in looked)
    unseen = say("Not looked at: {}later steps, another device, launch or data.", f"{left}; " * bool(left))
    yield from _wrap(unseen, width, "")


def _details(answer: Answer, width: int, language: str) -> Iterator[str]:
    """Yield the table of rewards, what was not checked and what held with its control, what was cut, and notes."""
    say = speak(language)
    yield from ["", *answer.rewards.picture(width, say)] if answer.rewards else []
    yield ""
    held = "HELD: looked for, and not there (in brackets: the same measurement with the failure put in on purpose)"
    for heading, findings in (
        ("NOT CHECKED", answer.not_checked),  # first: a person may know what these ask
        (held.replace("HELD", "HELD, with the repairs above") if answer.named else held, answer.held),
        ("DOES NOT APPLY", answer.not_applicable),
    ):
        yield from _wrap(say(heading), width, "", "  ") if findings else []
        for finding in findings:
            said = finding.why or f"{finding.evidence} ({finding.control})"
            title_ = "" if finding.failure in _TITLES else f" {title(finding.failure, language)}"
            yield from _wrap(f"{name(finding.failure, say)}{title_} – {said}", width, "  ", " " * 9)
    if answer.cut:
        yield from _wrap(say("Cut: {}.", "; ".join(answer.cut)), width, "")
    own = {finding.failure for finding in answer.accusations if finding.origin == SCRIPT}
    measured = atlas.cite(answer.versions, own) if answer.accusations else ""
    known = [say("what these releases have in some settings (docs/atlas.md): {}", measured)] if measured else []
    yield from itertools.chain(*(_wrap(say("Note: {}.", note), width, "") for note in [*answer.notes, *known]))


def _heading(finding: Finding, language: str) -> str:
    say = speak(language)
    about = [_place(finding.place, say)] if finding.place else []
    about += [say(word) for word in (finding.harm, finding.origin) if word and finding.verdict is Verdict.NOTED]
    where = f"  ({say(', ').join(about)})" * bool(about)
    named = f"{finding.failure} " * (finding.failure not in _TITLES)
    return f"{say(finding.verdict.value)}  {named}{title(finding.failure, language)}{where}"


def _place(place: Location, say: Say) -> str:
    at = say("cell {}, line {}", place.cell, place.line) if place.cell else say("line {}", place.line)
    return f"{pathlib.PurePath(place.file).name}, {at}"


def name(failure: str, say: Say = str.format) -> str:
    """Return a failure's id, or a short name of what is no failure of the registry."""
    return say(_TITLES[failure][0]) if failure in _TITLES else failure


def _names(findings: Sequence[Finding], say: Say) -> str:
    return ", ".join(dict.fromkeys(name(finding.failure, say) for finding in findings))


def title(failure: str, language: str = "en") -> str:
    """Return what a failure is called; empty where it has no title."""
    if failure in _TITLES:
        return speak(language)(_TITLES[failure][1])
    known = next((known for known in failures.all() if known.id == failure), None)
    return "" if known is None else known.title_zh if language == "zh" else known.title


def _wrap(text: str, width: int, first: str = "       ", others: str = "") -> list[str]:
    others = others or first or "  "
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
