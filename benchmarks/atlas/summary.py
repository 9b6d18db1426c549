"""The atlas as people see it, from evidence/atlas: the package's table, the heat map and docs/atlas.md.

    python benchmarks/atlas/summary.py

The table, `failurelab/failures/atlas.json`, has states alone; what was measured in a cell stands in evidence/atlas.
"""

import json
import pathlib
import sys
from typing import Any

import measure
from packaging.version import Version

from failurelab.failures import atlas

ROOT = measure.ROOT
PICTURE = ROOT / "evidence" / "atlas.svg"
PAGE = ROOT / "docs" / "atlas.md"
COLOURS = {
    atlas.NONE: "#d9efe0",
    atlas.SILENT: "#c0392b",
    atlas.LOUD: "#f0a030",
    atlas.NOT_THERE: "#ffffff",
    atlas.NOT_MEASURED: "#d5d8dc",
    atlas.COULD_NOT_RUN: "#8e959c",
}


def read_evidence(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return what was measured in each stack, those of trl first, by release."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]

    def place(record: dict[str, Any]) -> tuple[bool, Version]:
        package, _, version = record["stack"].partition("-")
        return package != "trl", Version(version)

    return sorted(records, key=place)


def make_table(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the package has: rows, and of each stack its versions, its defaults and the state of each row."""
    probes = measure.read_probes()
    rows = [{"id": probe["id"], "what": probe["what"], "failures": probe["failure"]} for probe in probes]
    columns = []
    for record in records:
        if "probes" not in record:
            continue
        found = {probe["id"]: [probe["state"], probe.get("failure", "")] for probe in record["probes"]}
        states = [found.get(row["id"]) for row in rows]
        column = {"name": record["stack"], "versions": record["versions"], "day": record["until"]}
        columns.append(column | {"states": states, "defaults": record["defaults"]})
    return {"rows": rows, "columns": columns}


def write_table(table: dict[str, Any]) -> None:
    """Write it, a line a row and a column."""
    parts = []
    for name, entries in table.items():
        lines = ",\n".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in entries)
        parts.append(f'"{name}": [\n{lines}\n]')
    atlas.FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def draw(rows: list[atlas.Setup], columns: list[atlas.Column]) -> None:
    """Draw the heat map: releases of trl from left to right, set-ups from top to bottom."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    matplotlib.rcParams["svg.hashsalt"] = "atlas"
    shown = [column for column in columns if column.name.startswith("trl-")]
    figure, axes = plt.subplots(figsize=(4.5 + 0.19 * len(shown), 1.6 + 0.2 * len(rows)))
    for x, column in enumerate(shown):
        for y, row in enumerate(rows):
            state = column.states.get(row.id, (atlas.NOT_MEASURED, ""))[0]
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=COLOURS[state], edgecolor="#b0b0b0", linewidth=0.4))
    axes.set(xlim=(0, len(shown)), ylim=(len(rows), 0))
    axes.set_xticks([x + 0.5 for x in range(len(shown))], [column.versions["trl"] for column in shown], rotation=90)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [row.id for row in rows])
    axes.tick_params(length=0, labelsize=7)
    handles = [Patch(facecolor=colour, edgecolor="#b0b0b0", label=state) for state, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=7, frameon=False)
    figure.suptitle("Each failure in each release of trl, measured with what could be installed on its day", fontsize=9)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(PICTURE, metadata={"Date": None})


HEAD = """# The atlas: each failure in each release

What people could install on the day of a release of trl (its wheel, and the newest transformers, peft, accelerate and
datasets of three days later, with torch as in all eras), and one small training for each row, judged by
[preflight](preflight.md). Nothing here is read in source texts. `failurelab upgrade 0.19.1 1.16.0` tells what another
release changes, defaults too; `make atlas` measures what is not there yet, in about a minute a release.

![Releases of trl from left to right, set-ups from top to bottom: no failure, silent, loud](../evidence/atlas.svg)

*Silent*: training goes on, and is wrong. *Loud*: it ends in an error. *Not there*: the release has no such trainer or
option. *Not measured*: preflight could not tell, for the reason that stands in the evidence. A row of steps beside
their definition is silent where the gradient is not the algorithm's. A failure that code of your own has to bring is
not here: the set-ups are plain scripts.
"""


def make_page(rows: list[atlas.Setup], records: list[dict[str, Any]]) -> str:
    """Return the text of docs/atlas.md: the picture, what was counted, and in which releases each row was found."""
    shown = [record for record in records if record["stack"].startswith("trl-")]
    measured = [record for record in shown if "probes" in record]
    cells = [probe["state"] for record in records for probe in record.get("probes", ())]
    counts = ", ".join(f"{cells.count(state)} {state}" for state in COLOURS)
    lines = [HEAD, f"Cells: {counts}.\n"]
    releases = ", ".join(record["pinned"]["trl"] for record in measured)
    lines.append(
        f"Releases of trl measured so far: {releases}. `a to b` below names the first and the last of these.\n"
    )
    for record in records:
        if "probes" not in record:
            lines.append(f"- {record['stack']} could not be installed: {record['could_not_be_installed'][:200]}")
    lines += ["\n## Where it changes\n", "| failure, set-up | releases of trl in which it was found |", "| --- | --- |"]
    for row in rows:
        states = [_state(record, row.id) for record in measured]
        found = _spans([each["pinned"]["trl"] for each in measured], [state in _FOUND for state in states])
        if found:
            lines.append(f"| {row.what} | {found} |")
    return "\n".join(lines) + "\n"


_FOUND = (atlas.LOUD, atlas.SILENT)


def _state(record: dict[str, Any], row: str) -> str:
    return next((str(probe["state"]) for probe in record["probes"] if probe["id"] == row), atlas.NOT_MEASURED)


def _spans(releases: list[str], found: list[bool]) -> str:
    """Return the releases in which something was found: those that follow each other as `first to last`."""
    spans: list[list[str]] = []
    before = False
    for release, there in zip(releases, found):
        if there and before:
            spans[-1][1] = release
        elif there:
            spans.append([release, release])
        before = there
    return ", ".join(first if first == last else f"{first} to {last}" for first, last in spans)


def main() -> int:
    """Write the table, the picture and the page."""
    records = read_evidence(measure.OUT)
    write_table(make_table(records))
    atlas.read.cache_clear()
    rows, columns = atlas.read()
    draw(rows, columns)
    PAGE.write_text(make_page(rows, records), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
