"""Tables of what benchmarks measured: runs as a pandas frame, spreads over seeds, Markdown.

A benchmark's file, evidence/cpu/NAME.json, says of each era what it ran on, and has a list of records. A run is a row
of the frame; the record's fields, its figures and the named groups of a pattern for its case are columns, NaN where a
run lacks one. Each function `table_NAME(folder)` of a benchmark's script makes one table, which pages show between
`<!-- table: NAME -->` and `<!-- end table -->`; `make tables` puts them there.
"""

import itertools
import pathlib
import re
import runpy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas
import recording


def make_tables(path: pathlib.Path) -> dict[str, str]:
    """Return the tables that the benchmark of a file NAME.json makes of it, by their names; none if it makes none.

    Raises:
        EvidenceError: the file, or another that a table needs, cannot be read.
    """
    script = pathlib.Path(__file__).with_name(f"{path.stem}.py")
    made = runpy.run_path(str(script)) if script.exists() else {}
    makers = {name.removeprefix("table_").replace("_", "-"): of for name, of in made.items() if name[:6] == "table_"}
    return {name: f"{of(path.parent)}\n" for name, of in makers.items()}


def read_runs(folder: pathlib.Path, benchmark: str, pattern: str = ".*", era: str = "") -> pandas.DataFrame:
    """Return the runs of a benchmark whose case fits a pattern; `first` and `last` are the ends of `rewards`."""
    rows = []
    for record in recording.read_file(folder / f"{benchmark}.json"):
        case, figures = re.fullmatch(pattern, record["case"]), record["figures"]
        if case and era in ("", record["era"]):
            ends = {"first": figures["rewards"][0], "last": figures["rewards"][-1]} if figures.get("rewards") else {}
            rows.append({**record, **case.groupdict(), **figures, **ends})
    return pandas.DataFrame(rows, dtype=object)  # of objects: counts stay whole numbers beside NaN


def group_runs(runs: pandas.DataFrame, labels: Iterable[str], *columns: str) -> dict[str, pandas.DataFrame]:
    """Return the runs of each label, in the order of `labels`; a run's is made of its values in these columns."""
    of_run = runs[list(columns)].agg(", ".join, axis=1)
    return {label: runs[of_run == label] for label in labels}


def list_runs(runs: pandas.DataFrame, *columns: str) -> Iterable[tuple[tuple, dict[str, Any]]]:
    """Return pairs, for `table`: a run's labels, which are its values in these columns, and the run as a dictionary."""
    return zip(runs[list(columns)].itertuples(index=False, name=None), runs.to_dict("records"))


def spread(values: Iterable[Any], form: str = ".2f", missing: str = "not recorded") -> str:
    """Return `median (minimum to maximum)` of the values that are recorded; the median alone where all look alike."""
    numbers = pandas.Series(values, dtype=float).dropna()
    if numbers.empty:
        return missing
    middle, least, most = (format(number, form) for number in (numbers.median(), numbers.min(), numbers.max()))
    return middle if least == most else f"{middle} ({least} to {most})"


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


def fold(body: Iterable[Sequence[Any]], column: int = 0) -> list[list[Any]]:
    """Return the lines of a table with those that differ in one column alone as one line."""
    folded: dict[tuple, list[str]] = {}
    for line in body:
        folded.setdefault((*line[:column], *line[column + 1 :]), []).append(str(line[column]))
    return [[*rest[:column], "; ".join(labels), *rest[column:]] for rest, labels in folded.items()]


def table(head: Sequence[str], lines: Iterable[tuple[Any, Any]], *columns: tuple) -> str:
    """Return a table with a line for each of `lines`, in Markdown; lines with the same cells are one.

    Args:
        head: what stands above the labels.
        lines: pairs of a label (or a tuple of labels) and what the line is about: a frame of runs, or one run.
        columns: what stands above, and the cell: a function of what the line is about, or the name of a figure and its
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
    return markdown([*head, *(above for above, *_ in columns)], fold(body, len(head) - 1))


def grid(
    head: Sequence[str],
    runs: pandas.DataFrame,
    cell: Callable[[Any], str],
    *,
    missing: str = "not recorded",
    **places: Iterable[str],
) -> str:
    """Return a table with a cell for each run, in Markdown.

    Args:
        head: what stands above the labels of the lines, then above each column.
        runs: no two for the same place, else pandas raises a ValueError.
        cell: makes a run's text.
        missing: the text of a place without a run.
        places: columns of the frame with their values: the last one goes across, the others down, in all combinations.
            Lines with the same cells are one.
    """
    cells = runs.set_index(list(places), verify_integrity=True).apply(cell, axis=1).to_dict()
    *down, across = places.values()
    lines = [[*line, *(cells.get((*line, value), missing) for value in across)] for line in itertools.product(*down)]
    return markdown(head, fold(lines, len(down) - 1))


def version_heads(runs: pandas.DataFrame, eras: Iterable[str], *libraries: str) -> list[str]:
    """Return for each era the versions of these libraries, as heads of columns."""
    versions = dict(zip(runs["era"], runs["versions"]))
    return [", ".join(f"{library} {versions[era][library]}" for library in libraries) for era in eras]


def changed(run: Any) -> str:
    """Return how many tensors a step changed, of the trainable ones."""
    return f"{run['changed']} of {run['trainable']}"


def percent(values: pandas.Series) -> str:
    """Return the spread of shares, in percent."""
    return spread([100 * value for value in values], ".2f") + " %"
