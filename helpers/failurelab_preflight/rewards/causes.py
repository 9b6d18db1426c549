"""Why a reward function pays the same to all, or a right answer no more than a wrong one.

It is asked again with one thing changed: first with the column that does not arrive, as the row has it, then with other
forms of completions and references. What makes it tell them apart is the cause, with what it paid then.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from failurelab_preflight.finding import Finding
from failurelab_preflight.repairs import Arguments, Keyword, Repair
from failurelab_preflight.reward_table import quote
from failurelab_preflight.rewards import forms, references, signature
from failurelab_preflight.rewards.examination import Examination
from failurelab_preflight.rewards.inputs import FORMS, OWN

Change = tuple[str, str, str, dict[str, Any]]  # what it undoes, the repair, how it is asked, and that as options
_TEXT = {"plain text": "Read a completion as the text that it is."}


def cause_of(x: Examination, said: str, kinds: Sequence[str] = ("column", "form", "reference")) -> Finding | None:
    """Return what, once undone, makes a function tell completions apart; None where nothing does.

    A column or a reference counts where right answers get more.
    """
    for kind in kinds:
        for undone, repair, tried, options in _CHANGES[kind](x):
            if told := x.tells(is_right=kind != "form", **options):
                said, tried = f"{said}: {undone}", f"{tried} {told}"
                if kind == "column":
                    return never_arrives(x, next(iter(options["columns"])), said, tried)
                return x.found(kind, said, repair, tried)
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
    else:
        renamed = Keyword("trainer", "train_dataset", f"{{}}.rename_column({source!r}, {name!r})")
        undo = renamed if source and source not in x.asked else None  # which is not taken from it
        columns = ", ".join(x.inputs.columns) or "none besides prompt"
        repair = f"Rename the dataset's column to {name!r} (dataset.rename_column), or the argument: {columns}."
    if not tried and source and only and (told := x.tells(columns={name: operator.itemgetter(source)})):
        tried = f"with {source} under this name {told}"
    return x.found("column", said, repair, tried, undo=undo, **more)


def _columns(x: Examination) -> Iterator[Change]:
    row, there = x.inputs.rows[0], x.inputs.names(x.wanted)
    others = [name for name, value in row.items() if name not in OWN and isinstance(value, (str, int, float))]
    for name in (name for name in x.asked if name in x.wanted or name in signature.REFERENCES):
        for source in dict.fromkeys([name, x.column, *others]) if name not in there else ():
            if source in row:
                some = x.completions if source == x.column else forms.make(x.inputs.rows, source, x.opened)
                options = {"some": some, "columns": {name: operator.itemgetter(source)}}
                said = f"it asks for the column {name!r}, which never arrives"
                yield said, "", f"with {source} under this name", options


def _forms(x: Examination) -> Iterator[Change]:
    own = x.inputs.form
    repair = _TEXT.get(own, 'Read the text of a completion as completion[0]["content"].')
    for form in (form for form in FORMS if form != own):
        said = f"it reads a completion as {form}, and each is {own} here"
        yield said, repair, f"as {form} the same texts get other rewards:", {"form": form}
    if x.opened:
        said = f"the prompt ends with {x.opened!r}, so no completion has that, and the function looks for it"
        repair = f"Judge {x.opened!r} + completion, or make the tag optional in the pattern."
        yield said, repair, "with it before the same completions", {"change": lambda text: x.opened + text}


def _references(x: Examination) -> Iterator[Change]:
    real = x.inputs.rows[0].get(x.column)
    for what, read in _OTHER_REFERENCES if x.asks_reference else ():
        if read(real) != real or type(read(real)) is not type(real):
            columns = {"columns": {x.column: lambda row, read=read: read(row[x.column])}}
            said = f"{x.column} is {type(real).__name__} {quote(str(real), 40)}, which it cannot equal"
            yield said, f"Compare with {x.column} as {what}: {read(real)!r}.", f"as {what}, {read(real)!r},", columns


def _as_number(value: Any) -> Any:
    text = references.bare(str(value)).replace(",", "")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return value


def _bare_answer(value: Any) -> Any:
    return references.bare(next(iter(references.readings(value)), str(value)))


_CHANGES = {"column": _columns, "form": _forms, "reference": _references}
# What a reference may have to be for a function to read it.
_OTHER_REFERENCES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("text", lambda value: value if isinstance(value, (list, dict)) else str(value)),
    ("a number", _as_number),
    ("the bare answer", _bare_answer),
    ("lower case", lambda value: str(value).lower()),
)
