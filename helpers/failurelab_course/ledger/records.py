"""The ledger: what runs measured, kept in the repository, and what was not run, with the reason.

A ledger is one JSON file under evidence/, named after the device: `cpu.json`, `h100.json`. It holds evidence records
(see `observe.record`). A machine may lack what a part needs: no compiler for DeepSpeed's operation, no network. Such a
part is kept as NOT RUN beside what was measured; it never counts as held.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from failurelab.errors import FailureLabError
from failurelab_course import eras

SCHEMA = 1
TIERS = ("cpu", "gpu", "simulated")  # as observe.TIERS, which imports torch
_FIELDS = {"schema": int, "versions": dict, "figures": dict} | dict.fromkeys(
    ("failure", "case", "state", "era", "tier", "device", "source"), str
)
_KEY = ("failure", "case", "state", "era", "tier", "device", "seed", "source")
Record = dict[str, Any]  # `processor` may be missing: older records do not name it


class EvidenceError(FailureLabError):
    """A ledger or record cannot be read, or what should make it failed."""


@dataclasses.dataclass(frozen=True)
class NotRun:
    """One part that was not run. `name` is what its records would have as their source; `era` is empty for any."""

    name: str
    reason: str
    era: str = ""

    def __str__(self) -> str:
        return f"NOT RUN {self.name}{f' in era {self.era}' if self.era else ''}: {self.reason}"


def validate(record: Record, where: str = "record") -> None:
    """Check one record against the schema.

    Raises:
        EvidenceError: a field is missing or of another type, or the schema is a newer one.
    """
    for field, kind in _FIELDS.items():
        if not isinstance(record.get(field), kind):
            raise EvidenceError(
                f"{where}: field {field!r} is {record.get(field)!r}, a {kind.__name__} is needed. "
                "Records are made by observe.record; next: record this evidence again."
            )
    if not isinstance(record.get("processor", ""), str):
        raise EvidenceError(f"{where}: processor is no text. Next: record this evidence again.")
    if record["tier"] not in TIERS:
        raise EvidenceError(
            f"{where}: tier is {record['tier']!r}, one of {', '.join(TIERS)} is needed: a figure without a tier "
            "says nothing. Next: record this evidence again."
        )
    if record["schema"] > SCHEMA:
        raise EvidenceError(
            f"{where}: schema {record['schema']} is newer than this package knows ({SCHEMA}). Next: update failurelab."
        )


def collect(folder: pathlib.Path) -> list[Record]:
    """Return the records that runs wrote under `folder`, all levels, in a stable order.

    Raises:
        EvidenceError: a line is not JSON, or not a record.
    """
    records = []
    for path in sorted(folder.rglob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise EvidenceError(f"{path.name} line {number} is not JSON: {error}") from error
            validate(record, f"{path.name} line {number}")
            records.append(record)
    return records


def key(record: Record) -> tuple[str, ...]:
    """Return what makes two records the same measurement, so that the newer one replaces the older."""
    return tuple(str(record.get(field)) for field in _KEY)


def read_ledger(path: pathlib.Path) -> list[Record]:
    """Return a ledger's records.

    Raises:
        EvidenceError: the file is missing, not JSON, or holds something else.
    """
    try:
        records = list(json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["records"])
    except FileNotFoundError as error:
        raise EvidenceError(f"no ledger at {path}. Next: failurelab evidence record --out {path}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(f"{path} is not a ledger ({error}). Next: git checkout it, or record again.") from error
    for number, record in enumerate(records, 1):
        validate(record, f"{path} record {number}")
    return records


def read_cards(folder: pathlib.Path | None = None) -> list[Record]:
    """Return the records of tier gpu of all ledgers in a folder, by default evidence/."""
    paths = (folder or eras.root() / "evidence").glob("*.json")
    ledgers = [read_ledger(path) for path in sorted(paths) if path.name != "cpu.json"]
    return [record for ledger in ledgers for record in ledger if record["tier"] == "gpu"]


def read_not_run(path: pathlib.Path) -> list[NotRun]:
    """Return what a ledger says was not run; nothing where there is no ledger, or one from before this was kept.

    Raises:
        EvidenceError: an entry without a name or a reason.
    """
    try:
        ledger = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    not_run = []
    for entry in ledger.get("not_run", []) if isinstance(ledger, dict) else []:
        try:
            not_run.append(NotRun(str(entry["name"]), str(entry["reason"]), str(entry.get("era", ""))))
        except (TypeError, KeyError, AttributeError) as error:
            raise EvidenceError(
                f"{path}: {entry!r} in not_run has no name or no reason. Next: record this evidence again."
            ) from error
    return not_run


def write_ledger(path: pathlib.Path, records: Iterable[Record], not_run: Iterable[NotRun] | None = None) -> None:
    """Write a ledger, sorted, one record a line, so that a change to it reads well in a diff; whole or not at all.

    Args:
        path: the file.
        records: all that was measured.
        not_run: all that was not; by default what the file has already.

    Raises:
        EvidenceError: something is no record, or two of one era and device were measured with different versions.
    """
    ordered = sorted(records, key=key)
    stacks: dict[tuple[str, str], Record] = {}
    for record in ordered:
        validate(record)
        first = stacks.setdefault((record["era"], record["device"]), record)
        old, new = first["versions"], record["versions"]
        if old != new:
            package = next(name for name in sorted({*old, *new}) if old.get(name) != new.get(name))
            raise EvidenceError(
                f"{path} would mix versions in era {record['era']}: {package} {old.get(package)} in "
                f"{first['source']} and {new.get(package)} in {record['source']}. Next: record all of the "
                "era again, or in another ledger."
            )
    lines = ",\n".join(json.dumps(record, sort_keys=True, ensure_ascii=False) for record in ordered)
    entries = read_not_run(path) if not_run is None else not_run
    listed = ",\n".join(json.dumps(dataclasses.asdict(entry), ensure_ascii=False) for entry in entries)
    more = f', "not_run": [\n{listed}\n]' if listed else ""
    temporary = pathlib.Path(f"{path}.{os.getpid()}")
    temporary.write_text(f'{{"schema": {SCHEMA}, "records": [\n{lines}\n]{more}}}\n', encoding="utf-8")
    temporary.replace(path)


def merge_records(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Return both together, without what `new` measured again: its source, in the same era, on the same device.

    A case that the source no longer has would else stay for ever.
    """
    new = list({key(record): record for record in new}.values())  # of the same measurement, the last
    again = {(record["source"], record["era"], record["device"]) for record in new}
    return [*(record for record in old if (record["source"], record["era"], record["device"]) not in again), *new]


def merge_not_run(old: Iterable[NotRun], new: Iterable[NotRun], measured: Iterable[Record]) -> list[NotRun]:
    """Return both together, without what has been measured or was not run again; an entry for any era goes too."""
    new = list(new)
    again = {(part.name, part.era) for part in new} | {(record["source"], record["era"]) for record in measured}
    sources = {name for name, _ in again}
    kept = [part for part in old if (part.name, part.era) not in again and (part.era or part.name not in sources)]
    return sorted({*kept, *new}, key=lambda part: (part.name, part.era))
