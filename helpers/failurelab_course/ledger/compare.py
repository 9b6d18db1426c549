"""What changed between two ledgers: of the same machine over time, or of two machines.

A measurement is the same in both if failure, case, state, era, seed and source are; tier and device may differ, and
are named. A verdict that differs (a count, a boolean, a text) is told apart from a magnitude that does (a time, a
memory, an accuracy): a second machine is expected to change the second kind only.
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from failurelab_course.ledger.not_run import NotRun
from failurelab_course.ledger.records import Record

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
    """What two ledgers have in common and not.

    Attributes:
        same: number of measurements that both hold.
        only_old: those that the first alone holds, as text.
        only_new: those that the second alone holds.
        not_run: those that the second lacks because it says that they were not run, with the reason.
        versions: packages whose version differs, by era: `"today: torch 2.13.0 -> 2.14.0"`.
        machines: the device and tier of each ledger.
        verdicts: figures that are counts, booleans or texts and differ.
        magnitudes: other numbers that differ by more than the tolerance.
    """

    same: int
    only_old: list[str]
    only_new: list[str]
    versions: list[str]
    machines: tuple[str, str]
    verdicts: list[Change]
    magnitudes: list[Change]
    not_run: list[str] = dataclasses.field(default_factory=list)

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
    first, second, not_run = _by_key(old), _by_key(new), list(not_run)
    both = [key for key in first if key in second]
    reasons = {key: reason for key in first if key not in second and (reason := _reason(key, not_run))}
    made = Comparison(
        same=len(both),
        only_old=[_where(key) for key in first if key not in second and key not in reasons],
        only_new=[_where(key) for key in second if key not in first],
        versions=_versions(first, second),
        machines=(_machine(first.values()), _machine(second.values())),
        verdicts=[],
        magnitudes=[],
        not_run=[f"{_where(key)}: {reason}" for key, reason in reasons.items()],
    )
    for key in both:
        figures, others = first[key]["figures"], second[key]["figures"]
        for name in dict.fromkeys([*figures, *others]):
            _compare_figure(made, _where(key), name, figures.get(name), others.get(name), tolerance)
    return made


def _reason(key: tuple, not_run: Iterable[NotRun]) -> str:
    """Return why the second ledger lacks a measurement, if it says so; a notebook's or lab's entry is for all eras."""
    *_, era, _, source = key
    return next((each.reason for each in not_run if each.name == source and each.era in ("", era)), "")


def _compare_figure(made: Comparison, where: str, name: str, old: Any, new: Any, tolerance: float) -> None:
    if isinstance(old, float) and isinstance(new, int | float) and not isinstance(new, bool):
        if abs(old - new) > tolerance * max(abs(old), abs(new)):
            made.magnitudes.append(Change(where, name, old, new, new / old if old else None))
    elif old != new:
        made.verdicts.append(Change(where, name, old, new))


def _by_key(records: Iterable[Record]) -> dict[tuple, Record]:
    return {tuple(str(record.get(field)) for field in _KEY): record for record in records}


def _where(key: tuple) -> str:
    failure, case, state, era, seed, source = key
    return f"{failure} {case} ({state}, {era}{'' if seed == 'None' else f', seed {seed}'}, {source})"


def _machine(records: Iterable[Record]) -> str:
    found = collections.Counter(f"{record['device']} (tier {record['tier']})" for record in records)
    return ", ".join(name for name, _ in found.most_common())


def _versions(first: dict[tuple, Record], second: dict[tuple, Record]) -> list[str]:
    old, new = ({record["era"]: record["versions"] for record in each.values()} for each in (first, second))
    return [
        f"{era}: {package} {old[era].get(package, '-')} -> {new[era].get(package, '-')}"
        for era in sorted(set(old) & set(new))
        for package in sorted({*old[era], *new[era]})
        if old[era].get(package) != new[era].get(package)
    ]
