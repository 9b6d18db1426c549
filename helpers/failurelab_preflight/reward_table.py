"""What reward functions paid for made-up completions, as a table that a person reads at a glance, and flags beside."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from failurelab_preflight.finding import Finding

_SHOWN = 4  # lines of the picture for each worth; the others stand in the JSON
_WORTH = ("right", "wrong", "other", "none")


@dataclasses.dataclass(frozen=True)
class Line:
    """One completion, and what each function paid for it: a number, None, or the text `raises`."""

    worth: str
    form: str
    text: str
    rewards: list[float | str | None]


@dataclasses.dataclass(frozen=True, repr=False)
class RewardTable:
    """What each reward function pays for the completions of one prompt.

    Attributes:
        functions: their keys, in the trainer's order.
        lines: a completion each.
        flags: what is to be said of them; the answer has it, and it crosses no pipe with the table.
        notes: more to know, such as a column that no function reads.
    """

    functions: list[str]
    lines: list[Line]
    flags: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON can hold it; of NaN and inf the text."""
        lines = [dataclasses.asdict(line) for line in self.lines]
        for line in lines:
            line["rewards"] = [_cell(value) if _is_odd(value) else value for value in line["rewards"]]
        return {"functions": self.functions, "lines": lines, "notes": self.notes}

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "RewardTable":
        """Return the table that `to_json` was asked for."""
        return cls(list(table["functions"]), [Line(**line) for line in table["lines"]], notes=list(table["notes"]))

    def __repr__(self) -> str:
        return "\n".join([*self.picture(), *map(_said, self.flags)])

    def picture(self, width: int = 100, say: Callable[..., str] = str.format) -> list[str]:
        """Return the table as about a dozen lines for a terminal, and its notes.

        Args:
            width: of a line, in columns.
            say: returns an English text in the reader's language, with values in the places of its `{}`.
        """
        said = (say("Note: {}.", note) for note in self.notes)
        notes = [line for note in said for line in textwrap.wrap(note, width, subsequent_indent="  ")]
        if not self.lines:
            return notes
        chosen, left = self._chosen()
        names = [key.partition(" ")[2][:14] for key in self.functions]
        cells = [[_cell(value) for value in line.rewards] for line in chosen]
        wide = [max(map(len, column)) for column in zip(names, *cells)]
        form = min(30, max(len(line.form) for line in chosen))
        rest = max(20, width - sum(wide) - 2 * len(wide) - form - 9)
        lines = [f"{'':7}{say('form'):{form}}  {say('completion'):{rest}}" + _right(names, wide)]
        for line, row in zip(chosen, cells):
            lines.append(
                f"{say(line.worth):7}{line.form[:form]:{form}}  {quote(line.text, rest):{rest}}" + _right(row, wide)
            )
        lines += [say("and {} more completions (--json has all)", left)] if left else []
        return [*lines, *notes]

    def _chosen(self) -> tuple[list[Line], int]:
        """Return a line of each worth and each row of rewards, the prompt's own forms first; and how many are left."""
        kinds: dict[tuple[Any, ...], Line] = {}
        for line in sorted(self.lines, key=lambda each: not each.form.startswith("prompt")):
            kinds.setdefault((line.worth, *map(_cell, line.rewards)), line)
        of_worth = [[line for line in kinds.values() if line.worth == worth][:_SHOWN] for worth in _WORTH]
        chosen = [line for lines in of_worth for line in lines]
        return chosen, len(self.lines) - len(chosen)


def _said(flag: Finding) -> str:
    return f"{flag.verdict.value} {flag.failure}: {flag.evidence or flag.why}"


def quote(text: str, width: int = 60) -> str:
    """Return a text in quotes, of one line, without its middle where it is long; a backslash stands there once."""
    shown = repr(text).replace("\\\\", "\\")
    return shown if len(shown) <= width else f"{shown[: width - 13]} ... {shown[-8:]}"


def _cell(value: float | str | None) -> str:
    return value if isinstance(value, str) else "None" if value is None else f"{value + 0.0:.4g}"  # of -0.0 no sign


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _right(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths))
