"""The tables and pictures of README.md and of pages in docs/, made from the ledger by `failurelab evidence tables`."""

import re
from collections.abc import Callable

from failurelab_course import eras
from failurelab_course.ledger import records as evidence
from failurelab_course.ledger.pictures import misalignment_digest, misalignment_picture, picture, picture_digest
from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables.machines import (
    SIMULATED,
    log_probs,
    misalignment,
    names,
    simulated,
    zero3_generation,
    zero3_parity,
    zero3_shards,
)
from failurelab_course.ledger.tables.memory import card_log_probs, predicted
from failurelab_course.ledger.tables.offline import offline
from failurelab_course.ledger.tables.times import notebook_times, times
from failurelab_course.ledger.tables.together import four, qlora
from failurelab_course.ledger.tables.training import (
    CURVES,
    cures,
    curves,
    depth,
    faces,
    generation,
    imports,
    learning,
    suspects,
)

__all__ = [
    "CURVES",
    "PAGES",
    "SIMULATED",
    "TABLES",
    "misalignment_digest",
    "misalignment_picture",
    "picture",
    "picture_digest",
    "update",
    "write",
]
# Where tables stand, from the repository's root.
PAGES = ("README.md", "docs/measured.md", "docs/offline.md", "docs/prerequisites.md")

TABLES: dict[str, Callable[[list[Record]], str]] = {
    "zero3-generation": zero3_generation,
    "zero3-parity": zero3_parity,
    "zero3-shards": zero3_shards,
    "learning": learning,
    "faces": faces,
    "generation": generation,
    "curves": curves,
    "suspects": suspects,
    "cures": cures,
    "depth": depth,
    "imports": imports,
    "simulated": simulated,
    "names": names,
    "misalignment": misalignment,
    "log-probs": log_probs,
    "card-log-probs": card_log_probs,
    "predicted": predicted,
    "four": four,
    "qlora": qlora,
    "offline": offline,
    "times": times,
    "notebook-times": notebook_times,
}


def update(text: str, records: list[Record]) -> str:
    """Return `text` with each block between `<!-- table: NAME -->` and `<!-- end table -->` made anew.

    Raises:
        EvidenceError: a block names a table that does not exist.
    """

    def made(match: re.Match) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise evidence.EvidenceError(f"unknown table {name!r}: the tables are {', '.join(TABLES)}")
        return f"<!-- table: {name} -->\n{TABLES[name](records)}\n<!-- end table -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end table -->", made, text, flags=re.DOTALL)


def write(records: list[Record]) -> dict[str, bool]:
    """Make the tables of all pages anew; return for each page whether it changed."""
    changed = {}
    for name in PAGES:
        path = eras.root() / name
        old = path.read_text(encoding="utf-8")
        new = update(old, records)
        path.write_text(new, encoding="utf-8")
        changed[name] = new != old
    return changed
