"""Why a reward function pays the same to all, or a right answer no more than a wrong one.

It is asked again with one thing changed: first with the column that does not arrive, as the row has it, then with other
forms of completions and references. What makes it tell them apart is the cause, with what it paid then.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from failurelab_preflight.finding import Finding
from failurelab_preflight.repairs import Arguments, Keyword, Repair
from failurelab_preflight.rewards import forms, references, signature
from failurelab_preflight.rewards.examination import Examination
from failurelab_preflight.rewards.inputs import FORMS, OWN
from failurelab_preflight.rewards.table import quote

_KINDS = ("column", "form", "reference")


@dataclasses.dataclass(frozen=True)
class _Change:
    """One thing changed in a call: what it undoes, in words, and how it is asked."""

    kind: str  # of _KINDS
    said: str
    repair: str
    tried: str
    options: dict[str, Any]
    column: str = ""


def cause_of(x: Examination, said: str, kinds: Sequence[str] = _KINDS) -> Finding | None:
    """Return what, once undone, makes a function tell completions apart; None where nothing does.

    A column or a reference counts where right answers get more.
    """
    for change in _changes(x):
        if change.kind not in kinds:
            continue
        if told := x.tells(is_right=change.kind in ("column", "reference"), **change.options):
            said, tried = f"{said}: {change.said}", f"{change.tried} {told}"
            if change.kind == "column":
                return never_arrives(x, change.column, said, tried)
            return x.found(change.kind, said, change.repair, tried)
    return None


def never_arrives(x: Examination, name: str, said: str, tried: str = "", only: bool = True, **more: Any) -> Finding:
    """Return the flag of a column that it asks for and that never arrives.

    Args:
        x: the function.
        name: of the column.
        said: the evidence.
        tried: what it gave with such a column; by default it is asked, with the row's own, or with the references.
        only: whether nothing else is missing.
        more: of the flag.
    """
    dropped = name in x.inputs.rows[0] and name not in (*OWN, *x.inputs.columns)
    source = name if dropped else x.column if x.column in x.inputs.rows[0] else ""
    if dropped:
        undo: Repair | None = Arguments({"remove_unused_columns": False})
        repair = "Set remove_unused_columns=False: the trainer drops the columns that the model does not take."
    elif name in OWN and name in x.inputs.rows[0]:
        undo = None
        repair = (
            f"Rename the column {name!r}, and the argument with it, to 'solution' say: trl hands on none of this name."
        )
    else:
        renamed = Keyword("trainer", "train_dataset", f"{{}}.rename_column({source!r}, {name!r})")
        undo = renamed if source and source not in x.asked else None  # which is not taken from it
        columns = ", ".join(x.inputs.columns) or "none besides prompt"
        repair = f"Rename the dataset's column to {name!r} (dataset.rename_column), or the argument: {columns}."
    if not tried and source and only and (told := x.tells(columns={name: operator.itemgetter(source)})):
        tried = f"with {source} under this name {told}"
    return x.found("column", said, repair, tried, undo=undo, **more)


def _changes(x: Examination) -> Iterator[_Change]:
    rows, own, there = x.inputs.rows, x.inputs.form, x.inputs.names(x.wanted)
    others = [name for name, value in rows[0].items() if name not in OWN and isinstance(value, (str, int, float))]
    for name in (name for name in x.asked if name in x.wanted or name in signature.REFERENCES):
        for source in dict.fromkeys([name, x.column, *others]) if name not in there else ():
            if source in rows[0]:
                some = x.completions if source == x.column else forms.make(rows, source, [x.function], x.opened)
                options = {"some": some, "columns": {name: operator.itemgetter(source)}}
                said = f"it asks for the column {name!r}, which never arrives"
                yield _Change("column", said, "", f"with {source} under this name", options, name)
    for form in FORMS:
        said = f"it reads a completion as {form}, and each is {own} here"
        tried = f"as {form} the same texts get other rewards:"
        if own == "plain text" != form:
            yield _Change("form", said, "Read a completion as the text that it is.", tried, {"form": form})
        elif form != own:
            repair = 'Read the text of a completion as completion[0]["content"].'
            yield _Change("form", said, repair, tried, {"form": form})
    if x.opened:
        said = f"the prompt ends with {x.opened!r}, so no completion has that, and the function looks for it"
        repair = f"Judge {x.opened!r} + completion, or make the tag optional in the pattern."
        change = {"change": lambda text: x.opened + text}
        yield _Change("form", said, repair, "with it before the same completions", change)
    blank = {"prompts": lambda row: _blank(row["prompt"])}
    said = "it reads prompts and completions as one text, and what it looks for stands in the prompt"
    yield _Change("form", said, "Look into the completion alone.", "with empty prompts", {"columns": blank})
    if lost := [token for token in x.inputs.special if any(token in each.text for each in x.completions)]:
        names = " and ".join(map(repr, lost))
        said = f"{names} are special tokens of the tokenizer, and the trainer decodes completions without these"
        repair = "Add them with add_tokens(...), which are not special, or read completion_ids."
        yield _Change("form", said, repair, "with them in the same completions", {"keep_special": True})
    real = rows[0].get(x.column)
    for what, read in _OTHER_REFERENCES if x.asks_reference else ():
        if read(real) != real or type(read(real)) is not type(real):
            columns = {"columns": {x.column: lambda row, read=read: read(row[x.column])}}
            said = f"{x.column} is {type(real).__name__} {quote(str(real), 40)}, which it cannot equal"
            repair = f"Compare with {x.column} as {what}: {read(real)!r}."
            yield _Change("reference", said, repair, f"as {what}, {read(real)!r},", columns)


def _blank(prompt: Any) -> Any:
    """Return a prompt of the same form without a word."""
    return [{**each, "content": ""} for each in prompt] if references.is_conversation(prompt) else ""


def _as_number(value: Any) -> Any:
    text = references.bare(str(value)).replace(",", "")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return value


def _first_reading(value: Any) -> Any:
    return next(iter(references.readings(value)), value)


# What a reference may have to be for a function to read it.
_OTHER_REFERENCES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("text", lambda value: value if isinstance(value, (list, dict)) else str(value)),
    ("a number", _as_number),
    ("the answer alone", _first_reading),
    ("the bare answer", lambda value: references.bare(str(_first_reading(value)))),
    ("text without blanks around it", lambda value: str(value).strip()),
    ("lower case", lambda value: str(value).lower()),
    ("a box", lambda value: f"\\boxed{{{value}}}"),
    ("a list", lambda value: [value]),
)
