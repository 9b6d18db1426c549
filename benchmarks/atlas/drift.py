"""What the newest releases changed: their columns of the atlas beside the last ones. It runs each night.

    python benchmarks/atlas/drift.py [--main] [--new NAME,...] [--out evidence/atlas]

Releases of trl and transformers that the evidence lacks are measured, and with --main trl's main branch, whose column
is not kept with the others. For each, what differs from the newest release before it is told: on the screen, and in the
summary of a workflow where there is one. A silent failure that the last release had not makes the exit status 1.
"""

import argparse
import json
import os
import pathlib
import sys
from typing import Any

import measure
import stacks
from packaging.version import Version

from failurelab.errors import FailureLabError
from failurelab.failures.atlas import LOUD, NONE, NOT_THERE, SILENT

Record = dict[str, Any]
TOLD = (LOUD, SILENT, NONE, NOT_THERE)  # states that say something of a release
NEWEST = 2  # releases of a package that are looked at, where the evidence lacks more


def read_before(stack: stacks.Stack, folder: pathlib.Path) -> Record | None:
    """Return the evidence of the newest release before a stack's, of the same package; None where there is none."""
    package, _, name = stack.name.partition("-")
    records = {}
    for path in folder.glob(f"{package}-*.json"):
        version = path.stem.partition("-")[2]
        record = json.loads(path.read_text(encoding="utf-8"))
        if "probes" in record and version != stacks.MAIN and (name == stacks.MAIN or Version(version) < Version(name)):
            records[Version(version)] = record
    return records[max(records)] if records else None


def differences(before: Record, after: Record) -> list[tuple[str, str, str, str]]:
    """Return row, state before, state after and what was measured, where both tell something and differ."""
    known = {probe["id"]: probe["state"] for probe in before["probes"]}
    return [
        (probe["id"], known[probe["id"]], probe["state"], probe["said"])
        for probe in after["probes"]
        if {known.get(probe["id"]), probe["state"]} <= set(TOLD) and known[probe["id"]] != probe["state"]
    ]


def describe(before: Record, after: Record) -> str:
    """Return what differs, and which defaults changed, as Markdown."""
    lines = [f"### {after['stack']}, after {before['stack']}", ""]
    rows = differences(before, after)
    if rows:
        lines += ["| set-up | before | now | measured |", "| --- | --- | --- | --- |"]
        lines += [f"| {row} | {was} | **{now}** | {said[:200].replace('|', '/')} |" for row, was, now, said in rows]
    else:
        lines.append("No row differs.")
    for config, fields in after.get("defaults", {}).items():
        old = before.get("defaults", {}).get(config, {})
        changed = [name for name in fields if name in old and old[name] != fields[name]]
        lines += [f"- default of {config}.{name}: {old[name]!r}, now {fields[name]!r}" for name in changed]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure what is new, and tell what differs; 1 if a silent failure came."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--main", action="store_true", help="also measure trl's main branch")
    parser.add_argument("--new", default="", help="names of stacks that count as new; without, those not measured yet")
    parser.add_argument("--out", type=pathlib.Path, default=measure.OUT, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2, help="stacks at a time")
    options = parser.parse_args()
    try:
        every = stacks.choose(stacks.read_index("trl"), stacks.read_index("transformers"))
        by_name = {stack.name: stack for stack in every}
        if unknown := [name for name in options.new.split(",") if name and name not in by_name]:
            raise measure.UnknownStack(f"no stack is called {', '.join(unknown)}. Next: measure.py --list names them")
        new = [by_name[name] for name in options.new.split(",") if name] or missing(every, options.out)
    except FailureLabError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    new += [stacks.main()] * options.main
    asked = argparse.Namespace(out=options.out, probes=[], again=False, jobs=options.jobs)
    (options.out / f"trl-{stacks.MAIN}.json").unlink(missing_ok=True)  # of another night
    measure.measure_all([stack for stack in new if measure.lacking(stack, options.out)], asked)
    return tell(new, options.out)


def missing(every: list[stacks.Stack], out: pathlib.Path) -> list[stacks.Stack]:
    """Return the newest stacks of each package that have no evidence."""
    found = []
    for package in ("trl", "transformers"):
        newest = [stack for stack in every if stack.name.startswith(f"{package}-")][-NEWEST:]
        found += [stack for stack in newest if not (out / f"{stack.name}.json").exists()]
    return found


def tell(new: list[stacks.Stack], out: pathlib.Path) -> int:
    """Print what differs, into a workflow's summary too; return 1 if a silent failure came."""
    parts, came = [], False
    for stack in new:
        path, before = out / f"{stack.name}.json", read_before(stack, out)
        after = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if before is None or "probes" not in after:
            parts.append(f"### {stack.name}\n\n{after.get('could_not_be_installed', 'not measured')}\n")
            continue
        came |= any(now == SILENT for _, _, now, _ in differences(before, after))
        parts.append(describe(before, after))
    text = "\n".join(parts or ["No release is new.\n"])
    print(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(text)
    (out / f"trl-{stacks.MAIN}.json").unlink(missing_ok=True)
    return int(came)


if __name__ == "__main__":
    sys.exit(main())
