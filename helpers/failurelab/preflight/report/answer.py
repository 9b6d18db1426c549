"""The answer of preflight: one screen, and JSON."""

import dataclasses
import re
import shutil
import textwrap
from typing import Any

from failurelab import failures
from failurelab.rewards.table import RewardTable

# Worst first: what ends a run, what makes it learn nothing or the wrong thing, what costs memory.
ORDER = (
    "F22", "F23", "F2", "F5", "F8", "F3b", "F1", "F7", "F21", "F14", "F12", "F13", "F10", "F9",
    "F11", "rate", "one row", "first rewards", "F19", "F15", "F20", "F3a",
)  # fmt: skip
_TITLES = {  # of what is no failure of the registry
    "rate": "A learning rate that cannot teach, or teaches too much",
    "one row": "One prompt to train on",
    "first rewards": "What the untrained model gets",
}


@dataclasses.dataclass
class Told:
    """What became of one script.

    Attributes:
        script: its path, as given.
        versions: of the libraries in its Python.
        findings: what is named, in the order in which it was found, the worst first in each round; each a dict of
            failure, evidence, tried (the same figure with the repair), repair, diff (of the script, empty where there
            is none), round and notebook.
        suspected: what is not named, worst first; each a dict of failure, evidence, why, repair, diff and notebook.
        held: each a dict of failure, evidence and control.
        not_applicable: what this script cannot have; each a dict of failure and why.
        not_checked: each a dict of failure and why.
        error: the script's own, or why it could not be asked; empty if nothing.
        script_sha256: of the script's bytes, so that an answer is not taken for that of another script.
        cut: what of the work was cut.
        notes: more to know.
        hidden: what is named and the first run did not show, for another failure hid it.
        ended_first: the error of the run without any change; empty if none.
        patch: all repairs that healed, as `git apply` takes them in `patch_folder`; empty where none is an edit.
        patch_folder: see `patch`.
        rewards: what the script's reward functions pay for made-up completions; None where they were not asked.
    """

    script: str
    versions: dict[str, str]
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    suspected: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    held: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    not_applicable: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    not_checked: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    error: str = ""
    script_sha256: str = ""
    cut: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    hidden: list[str] = dataclasses.field(default_factory=list)
    ended_first: str = ""
    patch: bytes = b""
    patch_folder: str = ""
    rewards: RewardTable | None = None

    @property
    def accusations(self) -> list[dict[str, Any]]:
        """What is named, then what is suspected."""
        return [*self.findings, *self.suspected]

    @property
    def exit_status(self) -> int:
        """1 if something is named or suspected, 3 if the script could not be asked, else 0."""
        return 1 if self.accusations else 3 if self.error else 0


def sort(told: Told) -> None:
    """Put findings worst first, drop answers that a finding overrules, and add the notebooks of the registry."""
    notebooks = {failure.id: failure.notebook for failure in failures.all()}
    told.findings.sort(key=lambda answer: (answer.get("round", 1), rank(answer["failure"])))
    named = {identity(answer) for answer in told.findings}
    named |= {(failure, about, "") for failure, about, _ in named}
    told.suspected = sorted(
        (answer for answer in told.suspected if identity(answer) not in named),
        key=lambda each: (not each.get("ends"), rank(each["failure"])),
    )
    found = {answer["failure"] for answer in told.accusations}
    for answer in told.accusations:
        answer["notebook"] = notebooks.get(answer["failure"]) or None
    told.not_checked = _once([a for a in told.not_checked if a.get("about") or a["failure"] not in found])
    left = found | {answer["failure"] for answer in told.not_checked}
    told.held = _once([answer for answer in told.held if answer["failure"] not in left])
    left |= {answer["failure"] for answer in told.held}
    told.not_applicable = _once([answer for answer in told.not_applicable if answer["failure"] not in left])


def identity(answer: dict[str, Any]) -> tuple[str, str, str]:
    """Return what two answers have in common that say the same: failure, what has it, and of a finding its repair.

    One function may have two failures of one id. Their repairs differ; numbers in them may differ from run to run.
    """
    repair = re.sub(r"\d[\d.,]*", "#", answer["repair"]) if "ends" in answer else ""
    return answer["failure"], answer.get("about", ""), repair


def rank(failure: str) -> int:
    """Return the place of a failure among all, the worst first."""
    return ORDER.index(failure) if failure in ORDER else len(ORDER)


def _once(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers in the order of their ids; more about one failure are put together."""
    texts: dict[str, dict[str, dict[str, None]]] = {}  # of a failure, of one of its fields: the texts, each once
    for answer in answers:
        fields = texts.setdefault(answer["failure"], {})
        for name in ("evidence", "control", "why"):
            if name in answer:
                fields.setdefault(name, {})[answer[name]] = None
    return [
        {"failure": failure, **{name: "; ".join(each) for name, each in fields.items()}}
        for failure, fields in sorted(texts.items(), key=lambda item: _id(item[0]))
    ]


def _id(failure: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, failure))
    return (int(digits) if failure.startswith("F") and digits else 10**6, failure)


def to_json(told: Told) -> dict[str, Any]:
    """Return the answer as JSON can hold it."""
    lists = ("findings", "suspected", "held", "not_applicable", "not_checked", "cut")
    rewards = told.rewards and told.rewards.to_json()
    return {name: getattr(told, name) for name in (*lists, "script", "script_sha256", "versions")} | {
        "rewards": rewards
    }


def text(told: Told) -> str:
    """Return the answer as lines for a terminal."""
    width = max(70, min(110, shutil.get_terminal_size().columns))
    lines = [*told.rewards.picture(width), ""] if told.rewards else []
    for word, answers in (("NAMED", told.findings), ("SUSPECTED", told.suspected)):
        for answer in answers:
            lines += [f"{word}  {answer['failure']} {title(answer['failure'])}", *_wrap(_figures(answer), width)]
            lines += _wrap(f"not named: {answer['why']}", width) if word == "SUSPECTED" else []
            lines += [*_repair(answer, "repair" if word == "SUSPECTED" else "repair (tried)", width), ""]
    for heading, answers in (
        ("HELD (in brackets: what the same measurement said with the failure planted)", told.held),
        ("NOT CHECKED", told.not_checked),
        ("DOES NOT APPLY", told.not_applicable),
    ):
        lines += [heading] * bool(answers)
        for answer in answers:
            said = answer["why"] if "why" in answer else f"{answer['evidence']} ({answer['control']})"
            lines += _wrap(said, width, f"  {answer['failure']:<6} ", " " * 9)
    if told.cut:
        lines += _wrap(f"Cut: {'; '.join(told.cut)}.", width, "")
    for note in told.notes:
        lines += _wrap(f"Note: {note}.", width, "")
    if told.error:
        lines += _wrap(f"ERROR {told.error}", width, "")
    if len(told.findings) > 1 or told.hidden or (told.findings and told.ended_first and not told.error):
        lines += _wrap(_chain(told), width, "")
    return "\n".join([*lines, verdict(told)])


def _chain(told: Told) -> str:
    """Return what hid behind what, in the order in which it was repaired."""
    parts = []
    for number, answer in enumerate(told.findings):
        repaired = ("", "with it repaired, ", "with both repaired, ")[number] if number < 3 else "with these repaired, "
        what = " ends the run" if not number and told.ended_first and not told.error else ""
        what = what or (" shows, which the first run hid" if answer["failure"] in told.hidden else "")
        parts.append(f"{repaired}{answer['failure']}{what}")
    last = "with it repaired" if len(parts) == 1 else "with both repaired" if len(parts) == 2 else "with all repaired"
    left = f"the script ends in an error: {told.error}" if told.error else (
        f"{', '.join(answer['failure'] for answer in told.suspected)} is suspected" if told.suspected
        else "nothing is found"
    )  # fmt: skip
    return f"In turn: {'; '.join(parts)}; {last}, {left}."


def verdict(told: Told) -> str:
    """Return one line that says what came of it."""
    parts = [
        f"{len(answers)} {word} ({', '.join(answer['failure'] for answer in answers)})"
        for answers, word in ((told.findings, "named"), (told.suspected, "suspected"))
        if answers
    ]
    if parts:
        return f"{told.script}: {', '.join(parts)}" + ("; the script ended in an error too." * bool(told.error))
    if told.error:
        return f"{told.script}: could not be judged."
    left = f", {len(told.not_checked)} not checked" if told.not_checked else ""
    other = f", {len(told.not_applicable)} do not apply" if told.not_applicable else ""
    return f"{told.script}: nothing found; {len(told.held)} held{left}{other}."


def _figures(answer: dict[str, Any]) -> str:
    """Return the figure of a failure, and that with it undone where there is one."""
    tried = answer.get("tried")
    return f"{answer['evidence']}; with this repair: {tried} (tried)" if tried else answer["evidence"]


def _repair(answer: dict[str, Any], what: str, width: int) -> list[str]:
    lines = _wrap(f"{what}: {answer['repair']}", width) if answer["repair"] else []
    lines += [f"         {line}" for line in answer.get("diff", "").splitlines()]
    if answer["notebook"]:
        lines += _wrap(f"why: notebooks/{answer['notebook']}.ipynb", width)
    return lines


def title(failure: str) -> str:
    """Return what a failure is called; empty where it has no title."""
    return (_TITLES | {each.id: each.title for each in failures.all()}).get(failure, "")


def _wrap(text: str, width: int, first: str = "       ", others: str = "") -> list[str]:
    others = others or first or "  "
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
