"""The atlas as people see it, from evidence/atlas: the package's table, the heat map and docs/atlas.md.

    python benchmarks/atlas/summary.py

The table, `failurelab/failures/atlas.json`, has states alone; what was measured in a cell stands in evidence/atlas.
"""

import html
import json
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

import columns
import measure

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


def find_places(records: list[dict[str, Any]]) -> dict[str, str]:
    """Return where each stack's evidence stands, below evidence/: its file, and its line as GitHub's links name it.

    Args:
        records: all that there are, in their order.
    """
    files: dict[pathlib.Path, list[str]] = {}
    for record in records:
        files.setdefault(columns.path(record["stack"], measure.OUT), []).append(record["stack"])
    return {
        stack: f"{path.relative_to(PICTURE.parent)}#L{line}"
        for path, stacks in files.items()
        for line, stack in enumerate(stacks, 1)
    }


def make_table(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the package has: rows, and of each stack its versions, its defaults and the state of each row."""
    probes = measure.read_probes()
    rows = [{"id": probe["id"], "what": probe["what"], "failures": probe["failure"]} for probe in probes]
    measured = []
    for record in records:
        if "probes" not in record:
            continue
        found = {probe["id"]: [probe["state"], probe.get("failure", "")] for probe in record["probes"]}
        states = [found.get(row["id"]) for row in rows]
        column = {"name": record["stack"], "versions": record["versions"], "day": record["until"]}
        measured.append(column | {"states": states, "defaults": record["defaults"]})
    return {"rows": rows, "columns": measured}


def write_table(table: dict[str, Any]) -> None:
    """Write it, a line a row and a column."""
    parts = []
    for name, entries in table.items():
        lines = ",\n".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in entries)
        parts.append(f'"{name}": [\n{lines}\n]')
    atlas.FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


WARNING = "F1 which passes warn"  # a row of figures, and of no failure
CELL, TOP = 9, 52  # pixels: of a cell, and above all of them
LETTER = 4.8  # pixels that a letter of a label takes at most, on the average, in the fonts that viewers have


def draw(rows: list[atlas.Setup], records: list[dict[str, Any]]) -> str:
    """Return the heat map as SVG: releases of trl from left to right, set-ups from top to bottom.

    Where it is opened by itself, a column leads to its evidence, and a cell with a failure tells what was measured.
    """
    shown, places = _of_trl(records), find_places(records)
    asked = {probe["id"] for probe in measure.asked_of("trl")}
    rows = [row for row in rows if row.id in asked]
    left = 8 + round(LETTER * max(len(row.id) for row in rows))
    width, height = left + CELL * len(shown) + 10, TOP + CELL * len(rows) + 30
    colours = "".join(f".c{number}{{fill:{colour}}}" for number, colour in enumerate(COLOURS.values()))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="8">',
        f"<style>rect{{stroke:#b0b0b0;stroke-width:.4}}{colours}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for y, row in enumerate(rows):
        lines.append(f'<text x="{left - 4}" y="{TOP + CELL * y + 7}" text-anchor="end">{html.escape(row.id)}</text>')
    states = list(COLOURS)
    for x, record in enumerate(shown):
        release, at = record["pinned"]["trl"], left + CELL * x
        lines.append(f'<text transform="translate({at + 7} {TOP - 4}) rotate(-90)">{release}</text>')
        lines.append(f'<a href="{places[record["stack"]]}">')
        cells = {probe["id"]: probe for probe in record["probes"]}
        for y, row in enumerate(rows):
            cell = cells.get(row.id, {"state": atlas.NOT_MEASURED})
            place = f'class="c{states.index(cell["state"])}" x="{at}" y="{TOP + CELL * y}"'
            told, said = "", f"trl {release}, {row.id}: {cell.get('said', '')[:80]}"
            if cell["state"] in _FOUND:
                told = f"<title>{html.escape(said)}</title>"
            lines.append(f'<rect {place} width="{CELL}" height="{CELL}">{told}</rect>')
        lines.append("</a>")
    for number, state in enumerate(states):
        at, below = left + 80 * number, height - 18
        lines.append(f'<rect class="c{number}" x="{at}" y="{below}" width="9" height="9"/>')
        lines.append(f'<text x="{at + 13}" y="{below + 8}">{state}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


HEAD = """# The atlas: each failure in each release

[中文](zh/atlas.md)

For whoever wants to upgrade, or to know whether a release has a failure. `failurelab upgrade 0.19.1 1.16.0` tells what
another release changes, defaults too.

![Releases of trl from left to right, set-ups from top to bottom: no failure, silent, loud](../evidence/atlas.svg)

*Silent*: training goes on, and is wrong. *Loud*: it ends in an error. *Not there*: the release has no such trainer or
option, or refuses the set-up. *Not measured*: preflight could not tell. Open the picture by itself to see what was
measured in a cell. What F1 is, and its repair: the [index by symptom](symptoms.md).
"""
HOW = """
## How it was measured

Each release of trl was installed with the newest other libraries of its day, and each release of transformers with the
newest trl of its day; torch is the course's. Each cell is one small training, judged by [preflight](preflight.md) or
measured. From 0.26 on, `OnlineDPOTrainer` is that of `trl.experimental`. `make atlas` measures what is missing.
"""
STEP = "GRPOTrainer's step beside its definition"  # of many rows, one line


def make_page(rows: list[atlas.Setup], records: list[dict[str, Any]]) -> str:
    """Return the text of docs/atlas.md: the picture, in which releases each row was found, and how it was measured.

    Each release that is named leads to its evidence.
    """
    links = {stack: f"../evidence/{place}" for stack, place in find_places(records).items()}
    measured, others = _of_trl(records), [each for each in records if "probes" in each and each not in _of_trl(records)]
    lines = [HEAD, "## Where it is found\n"]
    found: dict[str, list[str]] = {}  # set-ups of a step are one row: they differ in their options alone
    for row in rows:
        found.setdefault(f"{', '.join(row.failures)} {STEP}" if row.what.startswith(STEP) else row.id, []).append(
            row.id
        )
    for what, ids in found.items():
        spans = [_spans(ids, shown, package, links) for shown, package in ((measured, "trl"), (others, "transformers"))]
        if any(spans):
            options = f", with some of {len(ids)} sets of options" if ids[1:] else ""
            where = [f"{package} {span}" for package, span in zip(("trl", "transformers"), spans) if span]
            lines.append(f"- {what}{options} → {'; '.join(where)}")
    lines += ['\n## When "None of the inputs have requires_grad" is no false alarm\n']
    lines += ["It is harmless in passes of generation and scoring. In passes of training tensors are without a"]
    lines += ["gradient; there it was printed, with `use_reentrant=True`:\n", *_warned(measured), HOW]
    states = [probe["state"] for record in records for probe in record.get("probes", ())]
    counts = ", ".join(f"{states.count(state)} {state}" for state in COLOURS)
    asked = sum(
        len(stacks) * len(measure.asked_of(package))
        for stacks, package in ((measured, "trl"), (others, "transformers"))
    )
    ends = [record["pinned"]["trl"] for record in (measured[0], measured[-1])]
    lines.append("{} releases of trl, from {} to {}, and {} of transformers.".format(len(measured), *ends, len(others)))
    lines.append(f"Cells: {counts}{f', {asked - len(states)} not asked yet' * (asked > len(states))}.\n")
    for record in records:
        if "probes" not in record:
            why = record["could_not_be_installed"].removeprefix("error: ").partition(" cause: ")[0]
            lines.append(f"- {record['stack']} cannot be installed: {why}")
    return "\n".join([*lines, *_errors(records)]) + "\n"


_FOUND = (atlas.LOUD, atlas.SILENT)


def _of_trl(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["stack"].startswith("trl-") and "probes" in record]


def _errors(records: list[dict[str, Any]]) -> list[str]:
    """Return a line for each error that kept probes from running: in how many stacks, and the first."""
    stacks: dict[str, list[str]] = {}
    for record in records:
        for probe in record.get("probes", ()):
            if probe["state"] == atlas.COULD_NOT_RUN:
                error = re.split(" end(?:ed|s) in ", probe["said"])[-1][:60]
                stacks.setdefault(error, []).append(record["stack"])
    return [
        f"- could not run: {names[0]} and others ({len(names)} cells): `{error}`" for error, names in stacks.items()
    ]


def _warned(records: list[dict[str, Any]]) -> list[str]:
    """Return a line for each model: the releases that print the warning in a pass of training."""
    said = {
        record["pinned"]["trl"]: [int(counts.rpartition("/")[2]) for counts in probe["said"].split(", ")]
        for record in records
        for probe in record["probes"]
        if probe["id"] == WARNING and probe["state"] == atlas.NONE
    }
    return [
        f"- {model}: {_follow((release, counts[place] > 0) for release, counts in said.items()) or 'in no release'}"
        for place, model in enumerate(("full fine-tuning", "frozen embeddings", "`peft_config`"))
    ]


def _spans(rows: list[str], records: list[dict[str, Any]], package: str, links: dict[str, str]) -> str:
    """Return the releases in which one of these rows was found, with links."""
    return _follow(
        (
            f"[{record['pinned'][package]}]({links[record['stack']]})",
            any(probe["id"] in rows and probe["state"] in _FOUND for probe in record["probes"]),
        )
        for record in records
    )


def _follow(releases: Iterable[tuple[str, bool]]) -> str:
    """Return the releases in which something is so: those that follow each other as `first to last`."""
    spans: list[list[str]] = []
    before = False
    for release, is_so in releases:
        if is_so and before:
            spans[-1][1] = release
        elif is_so:
            spans.append([release, release])
        before = is_so
    return ", ".join(first if first == last else f"{first} to {last}" for first, last in spans)


def main() -> int:
    """Write the table, the picture and the page."""
    records = columns.read(measure.OUT)
    write_table(make_table(records))
    atlas.read.cache_clear()
    rows, _ = atlas.read()
    PICTURE.write_text(draw(rows, records), encoding="utf-8")
    PAGE.write_text(make_page(rows, records), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
