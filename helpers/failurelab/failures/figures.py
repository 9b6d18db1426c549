"""The table of figures: what is measured, by the names that the whole house uses (figures.toml)."""

import dataclasses
import functools
import pathlib

from failurelab.errors import FailureLabError
from failurelab.failures.predicates import Predicate, PredicateError, parse
from failurelab.failures.toml_table import Table


class FigureError(FailureLabError):
    """The table of figures is not as it must be; the message names the figure and the key."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One thing that is measured.

    Attributes:
        name: as predicates, JSON and evidence write it.
        unit: what is counted (`tensors`, `nats a token`, `share`); `yes or no`, or `text`.
        what: it is, in one line.
        healthy: what holds of it in a healthy run; None where the figure alone does not tell.
    """

    name: str
    unit: str
    what: str
    healthy: Predicate | None


@functools.cache
def table() -> dict[str, Figure]:
    """Return all figures by their names, in the table's order.

    Raises:
        FigureError: the table is not as it must be.
    """
    raw = Table.read(pathlib.Path(__file__).with_suffix(".toml"), FigureError)
    return {
        name: _read(name, Table("figures.toml", content, FigureError, f"{name}: "))
        for name, content in raw.rest.items()
    }


def _read(name: str, raw: Table) -> Figure:
    text = raw.text("healthy", "")
    try:
        healthy = parse(text) if text else None
    except PredicateError as error:
        raise raw.error("healthy", str(error)) from error
    if healthy and healthy.figure != name:
        raise raw.error("healthy", f"it speaks of {healthy.figure}")
    figure = Figure(name, raw.text("unit"), raw.text("what"), healthy)
    raw.done()
    return figure
