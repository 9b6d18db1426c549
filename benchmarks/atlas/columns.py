"""The evidence of the atlas: a file for each package, in which each stack is a line, in the order of the releases.

A stack is written as soon as it is measured, by one process at a time, and its file is replaced as a whole: whoever
reads meanwhile, or after the machine went down, finds whole lines. trl's main branch, which is not kept with the
releases, has a file of its own.
"""

import json
import pathlib
from typing import Any

import stacks
from packaging.version import Version

from failurelab_course import state_file

PACKAGES = ("trl", "transformers")
Record = dict[str, Any]


def path(stack: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the file in which a stack of this name is a line."""
    package, _, release = stack.partition("-")
    return folder / f"{release if release == stacks.MAIN else package}.jsonl"


def read(folder: pathlib.Path) -> list[Record]:
    """Return what was measured in each stack, those of trl first, by release; without trl's main branch."""
    return [record for package in PACKAGES for record in _read_lines(folder / f"{package}.jsonl")]


def read_stack(stack: str, folder: pathlib.Path) -> Record:
    """Return what was measured in the stack of this name; nothing where it was not measured."""
    return next((record for record in _read_lines(path(stack, folder)) if record["stack"] == stack), {})


def write(record: Record, folder: pathlib.Path) -> None:
    """Write a stack's line, in the place of the one that was there."""
    file = path(record["stack"], folder)
    last = {name: record[name] for name in ("probes", "defaults") if name in record}  # long, and of least interest last
    first = {name: value for name, value in record.items() if name not in last}
    with state_file.locked(file):
        others = [other for other in _read_lines(file) if other["stack"] != record["stack"]]
        records = [*others, {"stack": record["stack"], **first, **last}]
        if file.stem != stacks.MAIN:
            records.sort(key=lambda each: Version(each["stack"].partition("-")[2]))
        state_file.write(file, "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in records))


def _read_lines(file: pathlib.Path) -> list[Record]:
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
