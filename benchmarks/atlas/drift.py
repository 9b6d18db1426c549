"""What the newest releases changed: their columns of the atlas beside the last ones. It runs each night.

    python benchmarks/atlas/drift.py [--main [PLACE]] [--out evidence/atlas]

Releases of trl and transformers that the evidence lacks are measured, and with --main trl's main branch, whose column
is not kept with the others. For each, what differs from the releases before it is told: on the screen, and in the
summary of a workflow where there is one. So is what denies the registry, and what the registry states of this release
and no probe has asked. A silent failure that was not there before makes the exit status 1, and so does a row that
denies the registry, as where a failure has gone that is said to be there.

A row is compared with the last column that tells something of it: first with those that differ in that package alone (a
new transformers with the same trl, a new trl with the same minor release of transformers), then with the package's.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Collection

import columns
import measure
import stacks
import statements
from columns import Record
from packaging.version import Version

from failurelab.errors import FailureLabError
from failurelab.failures.atlas import LOUD, NONE, NOT_THERE, SILENT, STATES

TOLD = (LOUD, SILENT, NONE, NOT_THERE)  # states that say something of a release
NEWEST = 2  # releases of a package that are looked at, where the evidence lacks more


def read_before(after: Record, folder: pathlib.Path) -> list[Record]:
    """Return what a column is compared with, the newest first; what differs in one package alone before all others.

    Args:
        after: the column.
        folder: of all evidence.
    """
    package = after["stack"].partition("-")[0]
    other = {"trl": "transformers", "transformers": "trl"}[package]
    now = {name: Version(after["versions"][name]) for name in (package, other)}
    parts = 2 if other == "transformers" else None  # of the other's version that are to be the same: of trl's, all
    older: list[tuple[Version, Version, Record]] = []
    for record in columns.read(folder):
        if "probes" in record and record["stack"] != after["stack"]:
            of, beside = (Version(record["versions"][name]) for name in (package, other))
            if of < now[package]:
                older.append((of, beside, record))
    older.sort(key=lambda found: found[:2], reverse=True)
    alike = [record for _, beside, record in older if beside.release[:parts] == now[other].release[:parts]]
    same_kind = [record for _, _, record in older if record["stack"].startswith(f"{package}-")]
    return [*alike, *[record for record in same_kind if record not in alike]]


def last_told(before: list[Record], states: Collection[str] = TOLD) -> dict[str, tuple[str, Record]]:
    """Return of each row the last state of these, by default those that tell something, with its column."""
    known: dict[str, tuple[str, Record]] = {}
    for record in before:
        for probe in record["probes"]:
            if probe["state"] in states:
                known.setdefault(probe["id"], (probe["state"], record))
    return known


def differences(before: list[Record], after: Record) -> list[tuple[str, str, str, str]]:
    """Return row, state before and of which column, state now and what was measured, where they differ.

    What told nothing before is passed over; a row that tells nothing any more differs from the last column that has it.
    """
    told, newest = last_told(before), last_told(before, STATES)
    return [
        (probe["id"], f"{was}, {column['stack']}", probe["state"], probe["said"])
        for probe in after["probes"]
        for was, column in [(told if probe["state"] in TOLD else newest).get(probe["id"], ("", {}))]
        if was in TOLD and was != probe["state"]
    ]


def denials(after: Record) -> dict[str, str]:
    """Return the rows that show something else than the registry states, each with what it states."""
    return statements.find_contradictions(_states(after), after["versions"])


def _states(record: Record) -> dict[str, str]:
    return {probe["id"]: probe["state"] for probe in record["probes"]}


def describe(before: list[Record], after: Record) -> str:
    """Return what differs from the releases before and from the registry, and which defaults changed, as Markdown."""
    package = after["stack"].partition("-")[0]
    states, known = _states(after), last_told(before)
    compared = {column["stack"]: column for row, (_, column) in known.items() if row in states}
    now, *then = (
        f"{column['stack']} (trl {column['versions']['trl']}, transformers {column['versions']['transformers']})"
        for column in (after, *(compared.values() or before[:1]))
    )
    lines = [f"### {now}, beside {' and '.join(then)}", ""]
    rows = differences(before, after)
    if rows:
        lines += ["| set-up | before | now | measured |", "| --- | --- | --- | --- |"]
        lines += [f"| {row} | {was} | **{now}** | {said[:200].replace('|', '/')} |" for row, was, now, said in rows]
    else:
        lines.append("No row differs.")
    lines += [f"- the registry denies that {row} is **{states[row]}**: {what}" for row, what in denials(after).items()]
    asked = {probe["id"] for probe in measure.asked_of(package)}
    unasked = statements.find_unasked(states, after["versions"], asked)
    lines += [f"- stated of this release, and not asked ({why}): {'; '.join(what)}" for why, what in unasked.items()]
    last = next((record for record in before if record["stack"].startswith(f"{package}-")), before[0])
    for config, fields in after.get("defaults", {}).items():
        old = last.get("defaults", {}).get(config, {})
        changed = [name for name in fields if name in old and old[name] != fields[name]]
        lines += [f"- default of {config}.{name}: {old[name]!r}, now {fields[name]!r}" for name in changed]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure what is new, and tell what differs; 1 if a silent failure came, or the registry is denied."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    place = {"nargs": "?", "const": stacks.UPSTREAM, "default": "", "metavar": "PLACE"}
    parser.add_argument("--main", **place, help="also measure trl's main, of a folder or an address")
    parser.add_argument("--out", type=pathlib.Path, default=measure.OUT, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2, help="stacks at a time")
    options = parser.parse_args()
    try:
        every = stacks.choose(stacks.read_index("trl"), stacks.read_index("transformers"))
        new = missing(every, options.out)
        new += [stacks.main(options.main)] if options.main else []
    except FailureLabError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    asked = argparse.Namespace(out=options.out, probes=[], again=False, jobs=options.jobs)
    asked.main = options.main or stacks.UPSTREAM
    columns.path(f"trl-{stacks.MAIN}", options.out).unlink(missing_ok=True)  # of another night
    measure.measure_all([stack for stack in new if measure.lacking(stack, options.out)], asked)
    return tell(new, options.out)


def missing(every: list[stacks.Stack], out: pathlib.Path) -> list[stacks.Stack]:
    """Return the newest stacks of each package that have no evidence."""
    found, measured = [], {record["stack"] for record in columns.read(out)}
    for package in columns.PACKAGES:
        newest = [stack for stack in every if stack.name.startswith(f"{package}-")][-NEWEST:]
        found += [stack for stack in newest if stack.name not in measured]
    return found


def tell(new: list[stacks.Stack], out: pathlib.Path) -> int:
    """Print what differs, into a workflow's summary too; return 1 for a silent failure that came, or a denial."""
    parts, came = [], False
    for stack in new:
        after = columns.read_stack(stack.name, out)
        before = read_before(after, out) if "probes" in after else []
        if not before:
            parts.append(f"### {stack.name}\n\n{after.get('could_not_be_installed', 'not measured')}\n")
            continue
        came |= any(now == SILENT for _, _, now, _ in differences(before, after)) or bool(denials(after))
        parts.append(describe(before, after))
    text = "\n".join(parts or ["No release is new.\n"])
    print(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(text)
    columns.path(f"trl-{stacks.MAIN}", out).unlink(missing_ok=True)
    return int(came)


if __name__ == "__main__":
    sys.exit(main())
