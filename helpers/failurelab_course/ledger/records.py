"""The ledger: what runs measured, kept in the repository, and the tables made from it.

A ledger is one JSON file under evidence/, named after the device: `cpu.json`, `h100.json`. It holds evidence records
(see `observe.record`), and what was not run, with the reason (see `not_run`). README tables and its picture are made
from it by `ledger_tables`, never typed; a test finds a stale one.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterable
from typing import Any

from failurelab.errors import FailureLabError
from failurelab_course import eras

SCHEMA = 1
TIERS = ("cpu", "gpu", "simulated")  # as observe.TIERS, which imports torch
_FIELDS = {
    "schema": int,
    "failure": str,
    "case": str,
    "state": str,
    "era": str,
    "tier": str,
    "device": str,
    "versions": dict,
    "source": str,
    "figures": dict,
}
Record = dict[str, Any]


class EvidenceError(FailureLabError):
    """A ledger or record cannot be read, or what should make it failed."""


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
    found = []
    for path in sorted(folder.rglob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                made = json.loads(line)
            except ValueError as error:
                raise EvidenceError(f"{path.name} line {number} is not JSON: {error}") from error
            validate(made, f"{path.name} line {number}")
            found.append(made)
    return found


def key(record: Record) -> tuple:
    """Return what makes two records the same measurement, so that the newer one replaces the older."""
    return tuple(
        str(record.get(field)) for field in ("failure", "case", "state", "era", "tier", "device", "seed", "source")
    )


def load(path: pathlib.Path) -> list[Record]:
    """Return a ledger's records.

    Raises:
        EvidenceError: the file is missing, not JSON, or holds something else.
    """
    try:
        ledger = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        records = list(ledger["records"])
    except FileNotFoundError as error:
        raise EvidenceError(f"no ledger at {path}. Next: failurelab evidence record --out {path}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(f"{path} is not a ledger ({error}). Next: git checkout it, or record again.") from error
    for number, made in enumerate(records, 1):
        validate(made, f"{path} record {number}")
    return records


def load_not_run(path: pathlib.Path) -> list:
    """Return what a ledger says was not run, as `not_run.NotRun`; none where there is no ledger.

    Raises:
        EvidenceError: an entry without a name or a reason.
    """
    from failurelab_course.ledger import not_run

    try:
        ledger = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return not_run.read(ledger if isinstance(ledger, dict) else {}, str(path))


def save(path: pathlib.Path, records: Iterable[Record], not_run: Iterable | None = None) -> None:
    """Write a ledger, sorted, one record a line, so that a change to it reads well in a diff; whole or not at all.

    Args:
        path: the file.
        records: all that was measured.
        not_run: all that was not, as `not_run.NotRun`; by default what the file has already.

    Raises:
        EvidenceError: something is no record, or two of one era and device were measured with different versions.
    """
    ordered = sorted(records, key=key)
    stacks: dict[tuple[str, str], Record] = {}
    for made in ordered:
        validate(made)
        first = stacks.setdefault((made["era"], made["device"]), made)
        if first["versions"] != made["versions"]:
            packages = sorted({*first["versions"], *made["versions"]})
            package = next(each for each in packages if first["versions"].get(each) != made["versions"].get(each))
            raise EvidenceError(
                f"{path} would mix versions in era {made['era']}: {package} {first['versions'].get(package)} in "
                f"{first['source']} and {made['versions'].get(package)} in {made['source']}. Next: record all of the "
                "era again, or in another ledger."
            )
    lines = ",\n".join(json.dumps(made, sort_keys=True, ensure_ascii=False) for made in ordered)
    entries = load_not_run(path) if not_run is None else not_run
    listed = ",\n".join(json.dumps(dataclasses.asdict(each), ensure_ascii=False) for each in entries)
    more = f', "not_run": [\n{listed}\n]' if listed else ""
    temporary = pathlib.Path(f"{path}.{os.getpid()}")
    temporary.write_text(f'{{"schema": {SCHEMA}, "records": [\n{lines}\n]{more}}}\n', encoding="utf-8")
    temporary.replace(path)


def replace(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Return both together, without what `new` measured again: its source, in the same era, on the same device.

    A case that the source no longer has would else stay for ever.
    """
    new = list({key(made): made for made in new}.values())  # of the same measurement, the last
    again = {(made["source"], made["era"], made["device"]) for made in new}
    return [*(made for made in old if (made["source"], made["era"], made["device"]) not in again), *new]


def benchmarks() -> dict[str, tuple[str, ...]]:
    """Return each script in benchmarks/ that records evidence, with the eras it is to run in.

    A script says so in a line of its docstring: `Eras: today, trl-0.14`.
    """
    found = {}
    for path in sorted((eras.root() / "benchmarks").glob("*.py")):
        line = re.search(r"^Eras: (.+?)\.?$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if line:
            found[path.stem] = tuple(name.strip() for name in line.group(1).split(","))
    return found


def needs(name: str) -> list[str]:
    """Return what a benchmark says it needs, in a line of its docstring: `Needs: zero3`."""
    text = (eras.root() / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
    line = re.search(r"^Needs: (.+?)\.?$", text, re.MULTILINE)
    return [each.strip() for each in line.group(1).split(",")] if line else []


def run_benchmark(name: str, era_name: str, folder: pathlib.Path, device: str = "cpu") -> list[Record]:
    """Run one benchmark script in one era and return what it recorded.

    Raises:
        CannotRun: this machine lacks what it needs.
        EvidenceError: it failed, or recorded nothing.
    """
    from failurelab_course.ledger import not_run

    era = eras.find(era_name)
    if reason := not_run.unmet(needs(name), era, device):
        raise not_run.CannotRun(reason)
    inside = folder / f"{name}-{era_name}"
    done = eras.run(
        era,
        [str(eras.root() / "benchmarks" / f"{name}.py"), "--device", device],
        # one thread: as fast for small models, and the same sums on every machine
        env={
            "FAILURELAB_EVIDENCE": str(inside),
            "FAILURELAB_SOURCE": f"benchmarks/{name}.py",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        if reason := not_run.why(done.stdout, done.returncode):
            raise not_run.CannotRun(reason)
        tail = "\n".join(done.stdout.strip().splitlines()[-5:])
        raise EvidenceError(f"benchmarks/{name}.py failed in era {era_name} (exit status {done.returncode}):\n{tail}")
    made = collect(inside) if inside.is_dir() else []
    if not made:
        raise EvidenceError(f"benchmarks/{name}.py ended well in era {era_name} and recorded nothing")
    return made


@contextlib.contextmanager
def temporary_folder():
    """Yield a folder for the evidence of one recording; it is gone after."""
    with tempfile.TemporaryDirectory(prefix="failurelab-evidence-") as folder:
        yield pathlib.Path(folder)
