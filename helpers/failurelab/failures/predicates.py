"""Predicates over measured figures: what a failure's mechanisms and a lab's healthy run are written in.

A failure need not raise anything: "24 of 25 tensors have no gradient" is one, and so is "the rollouts are worse than
the model". So it is told by statements about figures, in a language small enough to be read by people and checked
without `eval`:

    tensors_without_gradient > 0
    accuracy_after >= accuracy_before          the right side may be another figure
    error ~ 'element 0 of tensors'             ~ finds a regular expression in a text
    checkpointing == true

In TOML a predicate is such a string, or a table with `check` and what to say when it holds or fails, in which
`{figure}` stands for the measured value:

    {check = "tensors_without_gradient == 0", fails = "{tensors_without_gradient} tensors still have no gradient"}

A predicate has three values. A figure that is None or NaN was not measured: then the predicate is neither true nor
false but unknown, None, and nobody may take that for a pass.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Value = float | int | bool | str | None

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_FORM = re.compile(rf"\s*({_NAME})\s*(<=|>=|==|!=|<|>|~)\s*({_NUMBER}|{_NAME}|'[^']*'|\"[^\"]*\")\s*")
_FIELD = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")
_WORDS = {"true": True, "false": False}
_Comparison = Callable[[Any, Any], bool]
_ORDER: dict[str, _Comparison] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_COMPARE: dict[str, _Comparison] = {**_ORDER, "==": operator.eq, "!=": operator.ne}


class PredicateError(ValueError):
    """A predicate cannot be read, or does not fit the figures; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class FigureName:
    """The right side of a predicate where it is another figure."""

    name: str


@dataclasses.dataclass(frozen=True)
class Predicate:
    """One statement about figures: `figure op value`.

    Attributes:
        figure: the name on the left.
        op: one of `<`, `<=`, `>`, `>=`, `==`, `!=`, `~` (a regular expression is found in a text).
        value: a number, a boolean, a text, or another figure's name.
        when_holds: what to say when it holds, with `{figure}` fields; may be empty.
        when_fails: what to say when it does not; may be empty.
    """

    figure: str
    op: str
    value: Value | FigureName
    when_holds: str = ""
    when_fails: str = ""

    def __str__(self) -> str:
        if isinstance(self.value, FigureName):
            right = self.value.name
        elif isinstance(self.value, bool):
            right = str(self.value).lower()
        else:
            right = repr(self.value)
        return f"{self.figure} {self.op} {right}"

    @property
    def names(self) -> tuple[str, ...]:
        """The figures that are needed to evaluate it."""
        return (self.figure, self.value.name) if isinstance(self.value, FigureName) else (self.figure,)

    def holds(self, figures: Mapping[str, Value]) -> bool | None:
        """Return whether it holds; None, unknown, where a figure is None or NaN, which could not be measured.

        Raises:
            PredicateError: a figure it names is absent, or the two sides cannot be compared, a text and a number, say.
        """
        left = _look_up(figures, self.figure, self)
        right = _look_up(figures, self.value.name, self) if isinstance(self.value, FigureName) else self.value
        if any(side is None or (isinstance(side, float) and math.isnan(side)) for side in (left, right)):
            return None
        if self.op == "~":
            if not isinstance(left, str) or not isinstance(right, str):
                raise PredicateError(f"{self}: ~ finds a regular expression in a text, and {self.figure} is {left!r}")
            return re.search(right, left) is not None
        if isinstance(left, str) != isinstance(right, str) or (isinstance(left, str) and self.op in _ORDER):
            raise PredicateError(f"{self}: {left!r} and {right!r} cannot be compared with {self.op}")
        return _COMPARE[self.op](left, right)

    def describe(self, figures: Mapping[str, Value]) -> str:
        """Return in words how it stands: its own text for the outcome, else the predicate and the measured values."""
        text = self.when_holds if self.holds(figures) else self.when_fails  # unknown is no pass
        if text:
            return fill(text, figures)
        values = ", ".join(f"{name} is {shown(figures[name])}" for name in dict.fromkeys(self.names))
        return f"{values} ({'as' if self.holds(figures) else 'not'} {self})"


def parse(source: str | Mapping[str, str] | Predicate) -> Predicate:
    """Read a predicate from a string `figure op value`, or from a table with `check`, `holds` and `fails`.

    Raises:
        PredicateError: it is not of this form.
    """
    if isinstance(source, Predicate):
        return source
    if isinstance(source, str):
        return _read(source)
    if not isinstance(source, Mapping):
        raise PredicateError(f"{source!r} is no predicate: write a string such as 'steps_done >= 10', or a table")
    unknown = set(source) - {"check", "holds", "fails"}
    if unknown or not isinstance(source.get("check"), str):
        problem = f"unknown key {sorted(unknown)[0]!r}" if unknown else "no text under 'check'"
        raise PredicateError(f"a predicate's table has the keys check, holds and fails; here: {problem}")
    read = _read(source["check"])
    for key in ("holds", "fails"):
        if not isinstance(source.get(key, ""), str):
            raise PredicateError(f"{read}: {key!r} must be a text")
    return dataclasses.replace(read, when_holds=source.get("holds", ""), when_fails=source.get("fails", ""))


def _read(text: str) -> Predicate:
    match = _FORM.fullmatch(text)
    if not match:
        raise PredicateError(
            f"{text!r} is no predicate: it must be FIGURE OP VALUE, with OP one of < <= > >= == != ~ and VALUE a "
            "number, true, false, a quoted text or another figure's name"
        )
    figure, op, right = match.groups()
    value: Value | FigureName
    if right[0] in "'\"":
        value = right[1:-1]
    elif right in _WORDS:
        value = _WORDS[right]
    elif re.fullmatch(_NAME, right):
        value = FigureName(right)
    else:
        value = float(right) if re.search(r"[.eE]", right) else int(right)
    if op == "~":
        if not isinstance(value, str):
            raise PredicateError(f"{text!r}: after ~ comes a regular expression in quotes")
        try:
            re.compile(value)
        except re.error as error:
            raise PredicateError(f"{text!r}: {value!r} is no regular expression ({error})") from error
    return Predicate(figure, op, value)


def parse_all(sources: Iterable[str | Mapping[str, str] | Predicate]) -> tuple[Predicate, ...]:
    """Read several predicates; see `parse`."""
    return tuple(parse(source) for source in sources)


def failing(predicates: Iterable[Predicate], figures: Mapping[str, Value]) -> list[Predicate]:
    """Return those that do not hold, or of which that is unknown, in order.

    Raises:
        PredicateError: one names a figure that is absent.
    """
    return [predicate for predicate in predicates if predicate.holds(figures) is not True]


def fill(template: str, figures: Mapping[str, Value]) -> str:
    """Return `template` with every `{figure}` replaced by its value; `{figure:.2f}` formats a number.

    Raises:
        PredicateError: it names a figure that is absent, or the format does not fit the value.
    """

    def replaced(match: re.Match[str]) -> str:
        value = _look_up(figures, match[1], template)
        if match[2] is None or value is None:
            return shown(value)
        try:
            return format(value, match[2])
        except ValueError as error:
            raise PredicateError(f"{template!r}: {value!r} cannot be written as {match[2]!r}") from error

    return _FIELD.sub(replaced, template)


def fields(template: str) -> tuple[str, ...]:
    """Return the names of the figures that `template` asks for."""
    return tuple(match[1] for match in _FIELD.finditer(template))


def shown(value: Value) -> str:
    """Return a figure as text: floats with three digits, None as "not measured"."""
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def _look_up(figures: Mapping[str, Value], name: str, asked_by: Any) -> Value:
    if name not in figures:
        raise PredicateError(
            f"{str(asked_by)!r} names the figure {name!r}, which was not measured. "
            f"Measured: {', '.join(sorted(figures))}"
        )
    return figures[name]
