"""The tables of README.md and docs/measured.md, by subject, and what they share: runs, spreads, Markdown.

A run is a row of a pandas frame, and each of its metrics a column. Every public function of the modules here makes the
table that has its name.
"""

import collections
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas

from failurelab_course.ledger.records import Record


class Selection(list):
    """A ledger's records, and on which processors those ran that a table was made from (to how many)."""

    def __init__(self, records: Iterable[Record]):
        super().__init__(records)
        self.processors: collections.Counter[str] = collections.Counter()

    def note(self) -> str:
        """Return what to say below the table: nothing if one processor made it, as far as is known."""
        unknown = self.processors[""]
        known = [f"{name} ({count})" for name, count in self.processors.most_common() if name]
        if len(known) + bool(unknown) < 2:
            return ""
        more = f", and one that was not recorded ({unknown})" if unknown else ""
        return f"\n\nRuns of different processors, which may round differently: {'; '.join(known)}{more}."


def select_runs(records: Iterable[Record], failure: str, pattern: str, era: str = "") -> pandas.DataFrame:
    """Return the benchmarks' runs of one failure; what notebooks recorded in passing stays out of the tables.

    Args:
        records: a ledger's.
        failure: the id, such as `"F1"`.
        pattern: a regular expression for the whole case; its named groups become columns.
        era: only the runs in this era; by default all.

    Returns:
        A frame with a row for each run. Its columns are the record's fields, the pattern's groups and the metrics (NaN
        where a run lacks one); `first` and `last` are the ends of `rewards`.
    """
    rows = []
    for record in records:
        metrics, case = record["figures"], re.fullmatch(pattern, record["case"])
        if case and record["failure"] == failure and record["source"].startswith("benchmarks/"):
            ends = {"first": metrics["rewards"][0], "last": metrics["rewards"][-1]} if metrics.get("rewards") else {}
            if isinstance(records, Selection) and record["tier"] == "cpu" and era in ("", record["era"]):
                records.processors[record.get("processor", "")] += 1
            rows.append({**record, **case.groupdict(), **metrics, **ends})
    runs = pandas.DataFrame(rows, dtype=object)  # of objects: counts stay whole numbers beside NaN
    return runs[runs["era"] == era] if era else runs


def group_runs(runs: pandas.DataFrame, labels: Iterable[str], *columns: str) -> dict[str, pandas.DataFrame]:
    """Return the runs of each label, in the order of `labels`; a run's is made of its values in these columns."""
    of_run = runs[list(columns)].agg(", ".join, axis=1)
    return {label: runs[of_run == label] for label in labels}


def list_runs(runs: pandas.DataFrame, *columns: str) -> Iterable[tuple[tuple, dict[str, Any]]]:
    """Return pairs, for `table`: a run's labels, which are its values in these columns, and the run as a dictionary."""
    return zip(runs[list(columns)].itertuples(index=False, name=None), runs.to_dict("records"))


def spread(values: Iterable[Any], form: str = ".2f", missing: str = "not recorded") -> str:
    """Return `median (minimum to maximum)` of the values that are recorded."""
    numbers = pandas.Series(values, dtype=float).dropna()
    if numbers.empty:
        return missing
    middle, least, most = (format(number, form) for number in (numbers.median(), numbers.min(), numbers.max()))
    return middle if len(numbers) == 1 else f"{middle} ({least} to {most})"


def median(values: Iterable[Any], form: str = ".2f", missing: str = "not recorded") -> str:
    """Return the median of the values that are recorded."""
    return spread(values, form, missing).partition(" (")[0]


def count(flags: pandas.Series) -> str:
    """Return of how many runs it is true, as `k of n`."""
    return f"{int(flags.sum())} of {len(flags)}"


def markdown(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def table(head: Sequence[str], lines: Iterable[tuple[Any, Any]], *columns: tuple) -> str:
    """Return a table with a line for each of `lines`, in Markdown.

    Args:
        head: what stands above the labels.
        lines: pairs of a label (or a tuple of labels) and what the line is about: a frame of runs, or one run.
        columns: what stands above, and the cell: a function of what the line is about, or the name of a metric and its
            format (`.2f` if not given), for the spread over runs, or for the value of one run (empty if it has none).
    """

    def make_cell(about: Any, cell: str | Callable, form: str = ".2f") -> Any:
        if callable(cell):
            return cell(about)
        if isinstance(about, pandas.DataFrame):
            return spread(about[cell], form)
        return "" if pandas.isna(about.get(cell)) else format(about[cell], form)

    body = []
    for label, about in lines:
        labels = label if isinstance(label, tuple) else (label,)
        body.append([*labels, *(make_cell(about, *how) for _, *how in columns)])
    return markdown([*head, *(above for above, *_ in columns)], body)


def grid(head: Sequence[str], runs: pandas.DataFrame, cell: Callable[[Any], str], **places: Iterable[str]) -> str:
    """Return a table with a cell for each run, in Markdown; a place without a run is `not recorded`.

    Args:
        head: what stands above the labels of the lines, then above each column.
        runs: no two for the same place, else pandas raises a ValueError.
        cell: makes a run's text.
        places: columns of the frame with their values: the last one goes across, the others down, in all combinations.
    """
    cells = runs.set_index(list(places), verify_integrity=True).apply(cell, axis=1).to_dict()
    *down, across = places.values()
    lines = itertools.product(*down)
    return markdown(head, [[*line, *(cells.get((*line, value), "not recorded") for value in across)] for line in lines])


def wilson(right: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson's score)."""
    if not total:
        return 0.0, 1.0
    z, share = 1.96, right / total
    middle, scale = share + z * z / (2 * total), 1 + z * z / total
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
