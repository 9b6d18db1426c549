"""The tables of README.md and of pages in docs/, made from the ledger by `failurelab evidence tables`."""

import inspect
import re
from collections.abc import Callable

from failurelab_course import eras
from failurelab_course.ledger.records import EvidenceError, Record
from failurelab_course.ledger.tables import (
    Selection,
    diagnosis,
    faults,
    labs,
    machines,
    memory,
    offline,
    policies,
    preflight,
    rounding,
    times,
    together,
    training,
)

# Where tables stand, from the repository's root.
PAGES = (
    "README.md",
    "docs/measured.md",
    "docs/preflight.md",
    "docs/diagnose.md",
    "docs/offline.md",
    "docs/faults.md",
    "docs/prerequisites.md",
    "docs/appendix/03.md",
    "docs/appendix/04.md",
    "labs/README.md",
)

TABLES: dict[str, Callable[[list[Record]], str]] = {
    name.replace("_", "-"): function
    for module in (
        machines,
        training,
        memory,
        together,
        rounding,
        policies,
        offline,
        preflight,
        diagnosis,
        labs,
        faults,
        times,
    )
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}


def update_tables(text: str, records: list[Record]) -> str:
    """Return `text` with each block between `<!-- table: NAME -->` and `<!-- end table -->` made anew.

    Raises:
        EvidenceError: a block names a table that does not exist.
    """

    def make_block(match: re.Match) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise EvidenceError(f"unknown table {name!r}: the tables are {', '.join(TABLES)}")
        selection = Selection(records)
        table = TABLES[name](selection)
        return f"<!-- table: {name} -->\n{table}{selection.note()}\n<!-- end table -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end table -->", make_block, text, flags=re.DOTALL)


def write_pages(records: list[Record]) -> dict[str, bool]:
    """Make the tables of all pages anew; return for each page whether it changed."""
    changed = {}
    for name in PAGES:
        path = eras.root() / name
        old = path.read_text(encoding="utf-8")
        new = update_tables(old, records)
        path.write_text(new, encoding="utf-8")
        changed[name] = new != old
    return changed
