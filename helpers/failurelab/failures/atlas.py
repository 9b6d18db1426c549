"""The atlas: what was measured of each failure in each release of trl and transformers, and how two releases differ.

`atlas.json` is written by `benchmarks/atlas/summary.py` from evidence/atlas, one line a stack: what people could
install on the day of a release. A cell is a `Setup` in a stack (`Column`); nothing is read in source texts.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from failurelab.errors import FailureLabError
from failurelab.failures.loader import PACKAGES, release

FILE = pathlib.Path(__file__).with_name("atlas.json")
LOUD, SILENT, NONE, NOT_THERE = "loud", "silent", "no failure", "not there"
NOT_MEASURED, COULD_NOT_RUN = "not measured", "could not run"
STATES = (LOUD, SILENT, NONE, NOT_THERE, NOT_MEASURED, COULD_NOT_RUN)


class UnknownRelease(FailureLabError):
    """A release that the atlas does not have; the message names those that are near."""

    exit_status = 2


@dataclasses.dataclass(frozen=True)
class Setup:
    """One set-up that was tried in all stacks.

    Attributes:
        id: such as `F1 frozen, default`.
        what: the set-up in words.
        failures: the ids of the registry that it can show.
    """

    id: str
    what: str
    failures: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Column:
    """One stack.

    Attributes:
        name: of its evidence, such as `trl-0.19.1`.
        versions: package to version, as they were installed.
        day: the last one whose releases were taken.
        states: of each row, by its id: what was found, and of which failure.
        defaults: of the fields of the configurations, by their name.
    """

    name: str
    versions: dict[str, str]
    day: str
    states: dict[str, tuple[str, str]]
    defaults: dict[str, dict[str, Any]]

    def had(self, rows: Container[str] | None = None) -> dict[str, set[str]]:
        """Return the failures that were found, with the ids of the rows that showed them; of these rows, if given."""
        found: dict[str, set[str]] = {}
        for row, (state, failure) in self.states.items():
            if state in (LOUD, SILENT) and (rows is None or row in rows):
                found.setdefault(failure, set()).add(row)
        return found


@functools.cache
def read() -> tuple[list[Setup], list[Column]]:
    """Return the rows and the columns, the columns by package and release."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    rows = [Setup(row["id"], row["what"], tuple(row["failures"])) for row in table["rows"]]
    columns = []
    for column in table["columns"]:
        states = {row.id: tuple(state) for row, state in zip(rows, column["states"]) if state}
        columns.append(Column(column["name"], column["versions"], column["day"], states, column["defaults"]))
    return rows, columns


def find(versions: Mapping[str, str]) -> Column | None:
    """Return the stack that was measured with these releases of trl and transformers; None if there is none.

    Where these two were not measured together, a stack of the same release of trl with another patch release of the
    same transformers is taken. A development version counts as the release whose code it has for the most part (see
    `release`).
    """
    try:
        trl, transformers = (release(versions[name]) for name in ("trl", "transformers"))
    except (KeyError, InvalidVersion):
        return None
    near = None
    for column in read()[1]:
        if "transformers" in column.versions and Version(column.versions.get("trl", "0")) == trl:
            if Version(column.versions["transformers"]) == transformers:
                return column
            near = near or (column if same_minor(column.versions["transformers"], transformers) else None)
    return near


def newest() -> Column:
    """Return the stack of the newest release of trl that was measured."""
    return [column for column in read()[1] if column.name.startswith("trl-")][-1]


def cite(versions: Mapping[str, str] | None = None, own: Collection[str] = ()) -> str:
    """Return in one line what was measured with these versions, and what an upgrade changes; empty where nothing was.

    Args:
        versions: package to version; None for those of this Python.
        own: failures that a script makes itself, which no upgrade heals.
    """
    column = find(_installed() if versions is None else versions)
    if column is None:
        return ""
    line = f"{_name(column)}, as measured: {_in_order(column.had()) or 'no failure'}"
    if Version(column.versions["trl"]) >= Version(newest().versions["trl"]):
        return line
    had, after = (each.had(column.states.keys() & newest().states.keys()) for each in (column, newest()))
    changes = {"heals": had.keys() - after.keys() - set(own), "brings": after.keys() - had.keys()}
    told = [f"{verb} {_in_order(ids)}" for verb, ids in changes.items() if ids] or ["changes none of these"]
    return f"{line}; an upgrade to {newest().versions['trl']} {' and '.join(told)}"


def _installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _in_order(ids: Iterable[str]) -> str:
    return ", ".join(sorted(ids, key=lambda id: (int("".join(filter(str.isdigit, id)) or 0), id)))


def table(failures: Sequence[str], package: str = "trl") -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table that says in which releases of a package a failure is.

    A row is a range of releases that follow each other and were found alike; its cells are the range and the state of
    each set-up, a column each. Set-ups that no release shows a failure in are left out. Each release was measured with
    what could be installed on its day.

    Args:
        failures: ids of set-ups, such as `F1 frozen, default`, or of the registry, such as `F1`: then the set-ups that
            are called so, and where none is, as for F21, those that can show it.
        package: whose releases the rows are: trl, or transformers, each with the trl of its day.

    Raises:
        UnknownRelease: no set-up is about these failures.
    """
    setups, columns = read()
    chosen = [row for row in setups if row.id in failures or row.id.split()[0] in failures]
    chosen = chosen or [row for row in setups if set(row.failures) & set(failures)]
    if not chosen:
        raise UnknownRelease(f"no set-up of the atlas is about {', '.join(failures)}. Next: an id of docs/atlas.md")
    columns = [column for column in columns if column.name.startswith(f"{package}-") and package in column.versions]
    found = [row for row in chosen if row.id in failures or any(_is_found(column, row) for column in columns)]
    seen = found or chosen
    rows: list[list[str]] = []
    first = ""
    for column in columns:
        states = [column.states.get(row.id, (NOT_MEASURED, ""))[0] for row in seen]
        last = column.versions[package]
        if rows and rows[-1][1:] == states:
            rows[-1][0] = f"{first} to {last}"
        else:
            first = last
            rows.append([first, *states])
    return [package, *(row.id for row in seen)], rows


def _is_found(column: Column, row: Setup) -> bool:
    return column.states.get(row.id, (NOT_MEASURED, ""))[0] in (LOUD, SILENT)


def of_release(trl: str) -> Column:
    """Return the stack of a release of trl, with what people could install on its day.

    A development version that precedes a release which was not measured counts as the newest one before it.

    Raises:
        UnknownRelease: it was not measured.
    """
    columns = [column for column in read()[1] if column.name.startswith("trl-")]
    try:
        wanted = release(trl)
    except InvalidVersion as error:
        raise UnknownRelease(f"{trl!r} is no version of trl. Next: a number such as 0.19.1") from error
    for column in columns:
        if Version(column.versions["trl"]) == wanted:
            return column
    before = [column for column in columns if Version(column.versions["trl"]) < wanted]
    if Version(trl).is_prerelease and before:
        return before[-1]
    minor = [version for version in (column.versions["trl"] for column in columns) if same_minor(version, wanted)]
    known = minor or [column.versions["trl"] for column in columns[:: max(1, len(columns) // 8)]]
    raise UnknownRelease(f"trl {trl} was not measured. Next: one of {', '.join(known) or 'none: make atlas'}")


def same_minor(version: str, other: Version) -> bool:
    """Return whether a version is of the same minor release as another one."""
    return Version(version).release[:2] == other.release[:2]


@dataclasses.dataclass(frozen=True)
class Changes:
    """What an upgrade brings, by measurements alone.

    Attributes:
        before: the stack that one comes from.
        after: the stack that one goes to.
        gone: rows whose failure was there before, and is not after.
        came: rows whose failure was not there before, and is after.
        stayed: rows whose failure is there in both.
        defaults: configuration, field, the default before and the one after, where they differ.
    """

    before: Column
    after: Column
    gone: tuple[Setup, ...]
    came: tuple[Setup, ...]
    stayed: tuple[Setup, ...]
    defaults: tuple[tuple[str, str, Any, Any], ...]


def compare(before: Column, after: Column) -> Changes:
    """Return how two stacks differ: rows that both have measured, and the defaults of fields that both have."""
    parts: dict[tuple[bool, bool], list[Setup]] = {}
    for row in read()[0]:
        states = [column.states.get(row.id, (NOT_MEASURED, ""))[0] for column in (before, after)]
        if all(state in (LOUD, SILENT, NONE, NOT_THERE) for state in states):
            was, now = (state in (LOUD, SILENT) for state in states)
            parts.setdefault((was, now), []).append(row)
    defaults = [
        (config, name, fields[name], after.defaults[config][name])
        for config, fields in before.defaults.items()
        for name in fields
        if name in after.defaults.get(config, {}) and after.defaults[config][name] != fields[name]
    ]
    gone, came, stayed = (tuple(parts.get(key, ())) for key in ((True, False), (False, True), (True, True)))
    return Changes(before, after, gone, came, stayed, tuple(defaults))


def describe_upgrade(before: str, after: str) -> str:
    """Return what changes from one release of trl to another, for a terminal; it says which version counts as another.

    Raises:
        UnknownRelease: one of them was not measured, or is no version.
    """
    columns = {version: of_release(version) for version in (before, after)}
    notes = [
        f"trl {version} was not measured, and counts as {column.versions['trl']}.\n"
        for version, column in columns.items()
        if Version(version) != Version(column.versions["trl"])
    ]
    return "".join(notes) + describe(compare(columns[before], columns[after]))


def describe(changes: Changes) -> str:
    """Return the changes of an upgrade for a terminal."""
    before, after = changes.before, changes.after
    lines = [f"From {_name(before)} to {_name(after)}, as they were measured:"]
    for title, rows, column in (
        ("gone", changes.gone, before),
        ("NEW", changes.came, after),
        ("still there", changes.stayed, after),
    ):
        lines.append(f"\n{title}:" + ("" if rows else " nothing"))
        for row in rows:
            state, failure = column.states[row.id]
            lines.append(f"  {failure:<4} {state:<7} {row.what}")
    lines.append("\ndefaults that change without a word:" + ("" if changes.defaults else " none"))
    lines += [f"  {config}.{name}: {old!r} -> {new!r}" for config, name, old, new in changes.defaults]
    return "\n".join(lines)


def _name(column: Column) -> str:
    return ", ".join(f"{name} {column.versions[name]}" for name in ("trl", "transformers") if name in column.versions)
