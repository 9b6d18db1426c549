"""Wrong completions in which the right answer stands beside the point, asked of one reward function.

A function that looks for the answer anywhere, or takes the first that it meets, tells right completions from wrong ones
in all common forms. It pays a wrong one too, where the right answer is mentioned on the way, or where a copy of the
prompt names all choices. Many such functions train well, so a mention alone is a note.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from failurelab.rewards import forms
from failurelab.rewards.examination import Examination
from failurelab.rewards.figures import SAME
from failurelab.rewards.forms import Completion
from failurelab.rewards.table import Flag, quote

_MENTION = "I thought of {} first, but that is not it.\n"


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of the dataset, and what a function paid in the form in which it pays most for the right answer.

    Attributes:
        answer: the right one alone.
        prompt: what the user says last.
        wrong: a completion with a wrong answer in that form.
        paid: for the right answer in that form.
    """

    answer: str
    prompt: str
    wrong: Completion
    paid: float


def look(x: Examination) -> Iterator[Flag | str]:
    """Yield a flag where a copy of the prompt gets what the right answer gets, else a note on answers in passing."""
    rows = _rows(x) if x.asks_reference and x.weight > 0 else {}
    if not rows:
        return
    mentions, copies = {}, {}
    for number, row in rows.items():
        mention = _MENTION.format(row.answer)
        mentions[number] = dataclasses.replace(row.wrong, form="mentioned", text=mention + row.wrong.text)
        copies[number] = Completion(number, "none", "prompt", row.prompt)
    values = x.ask([*mentions.values(), *copies.values()]).values
    if len(values) != 2 * len(rows) or None in values:
        return
    paid = dict(zip([*mentions.values(), *copies.values()], values))

    def is_paid(asked: Mapping[int, Completion]) -> bool:
        return all((paid[asked[number]] or 0.0) >= row.paid - SAME for number, row in rows.items())

    number, row = next(iter(rows.items()))
    if is_paid(copies) and _names_choices(rows):
        said = f"{x.key} gives {row.paid:g} to a copy of the prompt, {quote(row.prompt)}, as to the right answer: it "
        said += "finds the answer anywhere, and the prompts name the wrong ones beside it"
        repair = "Read the answer where the prompt asks for it, and compare it as a whole."
        why = "whether a policy comes to copy its prompt only a run tells"
        yield Flag(x.key, "F14", "SUSPECTED", said, repair, control=why, fault="copy")
    elif is_paid(mentions):
        said = f"{x.key} gives {row.paid:g}, as to the right answer, to a wrong one that mentions the right one on the"
        yield f"{said} way: {quote(mentions[number].text)}"


def _rows(x: Examination) -> dict[int, _Row]:
    """Return the rows whose right answer gets more than a wrong one, as the dataset writes it."""
    asked = [(each, value) for each, value in zip(x.completions, x.rewards) if value is not None and not each.variant]
    by_form = {(each.row, each.form, each.worth): (each, value) for each, value in asked}
    rows: dict[int, _Row] = {}
    for (number, form, worth), (_, value) in by_form.items():
        wrong, alone = by_form.get((number, form, "wrong")), by_form.get((number, "alone", "right"))
        if worth != "right" or wrong is None or alone is None or value <= wrong[1] + SAME:
            continue
        if number not in rows or value > rows[number].paid + SAME:
            prompt = forms.last_text(x.inputs.rows[number]["prompt"])
            rows[number] = _Row(alone[0].text, prompt, wrong[0], value)
    return rows


def pays_alone(x: Examination) -> bool:
    """Return whether each row's reference gets more than a wrong one, alone and as the dataset has it."""
    asked = [(each, value) for each, value in zip(x.completions, x.rewards) if value is not None and not each.variant]
    paid = {(each.row, each.worth): (each.text, value) for each, value in asked if each.form == "alone"}
    rows = {row for row, worth in paid if worth == "right"}
    return x.weight > 0 and bool(rows) and all(
        paid[row, "right"][0] == str(x.inputs.rows[row].get(x.column))
        and paid[row, "right"][1] > paid.get((row, "wrong"), ("", math.inf))[1] + SAME
        for row in rows
    )  # fmt: skip


def _names_choices(rows: Mapping[int, _Row]) -> bool:
    """Return whether each prompt has its own right answer and one of another row's."""
    answers = {row.answer for row in rows.values()}

    def named(prompt: str) -> set[str]:
        return {each for each in answers if re.search(rf"(?<!\w){re.escape(each)}(?!\w)", prompt, re.IGNORECASE)}

    return len(answers) > 1 and all(row.answer in (its := named(row.prompt)) and len(its) > 1 for row in rows.values())
