"""What the tables and pictures made from a ledger have in common: records of a case, spreads, Markdown."""

import statistics
from collections.abc import Iterable

from failurelab_course.ledger.records import Record

ERAS = ("trl-0.14", "trl-0.15", "trl-0.14-tf-4.52", "today")


def of(records: Iterable[Record], failure: str, case: str) -> list[Record]:
    """Return the benchmarks' records of a case; what notebooks recorded in passing stays out of the tables."""
    return [
        made
        for made in records
        if made["failure"] == failure and made["case"] == case and made["source"].startswith("benchmarks/")
    ]


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return `median (minimum to maximum)`."""
    numbers = sorted(float(value) for value in values)
    if not numbers:
        return "not recorded"
    middle = f"{statistics.median(numbers):.{digits}f}"
    return middle if len(numbers) == 1 else f"{middle} ({numbers[0]:.{digits}f} to {numbers[-1]:.{digits}f})"


def markdown(head: list[str], body: list[list]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
