"""What changed between two ledgers: of the same machine over time, or of two machines.

A measurement is the same in both if failure, case, state, era, seed and source are; tier and device may differ, and
are named. A verdict that differs (a count, a boolean, a text) is told apart from a magnitude that does (a time, a
memory, an accuracy): a second machine is expected to change the second kind only.
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from failurelab_course.ledger.records import NotRun, Record

_KEY = ("failure", "case", "state", "era", "seed", "source")


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure of one measurement that differs. `ratio` is new over old for magnitudes, else None."""

    where: str
    figure: str
    old: Any
    new: Any
    ratio: float | None = None


@dataclasses.dataclass
class Comparison:
    """What two ledgers have in common and not. Measurements are named in words: failure, case, state, era, source."""

    same: int  # how many measurements both hold
    only_old: list[str]
    only_new: list[str]
    versions: list[str]  # "today: torch 2.13.0 -> 2.14.0"
    machines: tuple[str, str]  # device, tier, and processor where it is recorded
    verdicts: list[Change]  # counts, booleans and texts that differ
    magnitudes: list[Change]  # other numbers that differ by more than the tolerance
    not_run: list[str]  # what the second lacks because it says that this was not run, with the reason

    @property
    def holds(self) -> bool:
        """Whether nothing is missing from the second ledger without a reason, and no verdict differs."""
        return not self.only_old and not self.verdicts


def compare(
    old: Iterable[Record], new: Iterable[Record], tolerance: float = 0.1, not_run: Iterable[NotRun] = ()
) -> Comparison:
    """Compare two ledgers' records.

    Args:
        old: the first ledger.
        new: the second.
        tolerance: relative difference up to which two magnitudes count as the same.
        not_run: what the second ledger says was not run.
    """
    first, second = ({_key(record): record for record in records} for records in (old, new))
    both = [key for key in first if key in second]
    parts = {(part.name, part.era): part.reason for part in not_run}
    reasons = {}
    for key in (key for key in first if key not in second):
        *_, era, _, source = key
        if reason := parts.get((source, era)) or parts.get((source, "")):  # a notebook's or lab's is for all eras
            reasons[key] = reason
    verdicts, magnitudes = [], []
    for key in both:
        old_metrics, new_metrics = first[key]["figures"], second[key]["figures"]
        for name in dict.fromkeys([*old_metrics, *new_metrics]):
            before, after = old_metrics.get(name), new_metrics.get(name)
            if isinstance(before, float) and isinstance(after, int | float) and not isinstance(after, bool):
                if abs(before - after) > tolerance * max(abs(before), abs(after)):
                    magnitudes.append(Change(_where(key), name, before, after, after / before if before else None))
            elif before != after:
                verdicts.append(Change(_where(key), name, before, after))
    return Comparison(
        same=len(both),
        only_old=[_where(key) for key in first if key not in second and key not in reasons],
        only_new=[_where(key) for key in second if key not in first],
        versions=_compare_versions(first.values(), second.values()),
        machines=(_machine(first.values()), _machine(second.values())),
        verdicts=verdicts,
        magnitudes=magnitudes,
        not_run=[f"{_where(key)}: {reason}" for key, reason in reasons.items()],
    )


def _key(record: Record) -> tuple[str, ...]:
    return tuple(str(record.get(field)) for field in _KEY)


def _where(key: tuple[str, ...]) -> str:
    failure, case, state, era, seed, source = key
    return f"{failure} {case} ({state}, {era}{'' if seed == 'None' else f', seed {seed}'}, {source})"


def _machine(records: Iterable[Record]) -> str:
    machines = collections.Counter(
        f"{record['device']} (tier {record['tier']}{', ' + record['processor'] if record.get('processor') else ''})"
        for record in records
    )
    return ", ".join(name for name, _ in machines.most_common())


def _compare_versions(first: Iterable[Record], second: Iterable[Record]) -> list[str]:
    old, new = ({record["era"]: record["versions"] for record in records} for records in (first, second))
    return [
        f"{era}: {package} {old[era].get(package, '-')} -> {new[era].get(package, '-')}"
        for era in sorted(old.keys() & new.keys())
        for package in sorted({*old[era], *new[era]})
        if old[era].get(package) != new[era].get(package)
    ]
