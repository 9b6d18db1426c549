"""The registry: one small file for each failure, and what is asked of them.

A failure has an id that is never used again, the texts a learner would paste, its cause, a signature over measured
figures, the versions that have it, and the claims on trial. Labs, the index by symptom, `symptoms` and `doctor` are
made from these files, so that a fact about a failure stands in one place.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping

from packaging.version import Version

from failurelab.failures.loader import Claim, Failure, RegistryError, Stack, Thread, load, release, retired_ids

__all__ = [
    "Affected",
    "Claim",
    "Failure",
    "RegistryError",
    "Stack",
    "Thread",
    "affected",
    "all",
    "get",
    "release",
    "upgrades",
]
_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Affected:
    """Whether a set of versions has a failure, and why; true or false as it stands.

    `own_code` says that these versions have it in code of one's own, where trl's trainers are spared.
    """

    hit: bool
    reason: str
    own_code: bool = False

    def __bool__(self) -> bool:
        return self.hit


def all() -> list[Failure]:
    """Return every failure, in the order of their ids.

    Raises:
        RegistryError: a file in the registry is not as it must be.
    """
    return list(load(_FOLDER).values())


def get(id: str) -> Failure:
    """Return one failure.

    Raises:
        RegistryError: there is none of this id; the message says whether it is retired.
    """
    failures = load(_FOLDER)
    if id in failures:
        return failures[id]
    why = retired_ids(_FOLDER).get(id)
    what = f"failure {id} is retired: {why}" if why else f"unknown failure {id!r}"
    raise RegistryError(f"{what}. There: {', '.join(failures)}")


def affected(failure: Failure | str, versions: Mapping[str, str]) -> Affected:
    """Return whether these versions (package to version) have the failure, with the reason.

    A failure that only a loop of one's own meets, or that only some machines have, counts as no hit, and the reason
    says so.

    Raises:
        RegistryError: an unknown failure, or a version that is none.
    """
    failure = get(failure) if isinstance(failure, str) else failure
    own_code, elsewhere = [], []
    for stack in failure.affected:
        if not stack.holds(versions):
            continue
        have = ", ".join(f"{package} {versions[package]}" for package in stack.versions)
        if stack.only_where:
            elsewhere.append(f"only {stack.only_where}; {have}: {stack.what}")
        elif not stack.only_own_code:
            return Affected(True, f"{have}: {stack.what}")
        else:
            own_code.append(f"{have}: {stack.what}")
    if own_code:
        return Affected(False, f"not by the defaults of trl's trainers here; {'; or '.join(own_code)}", own_code=True)
    if elsewhere:
        return Affected(False, "; or ".join(elsewhere))
    needed = dict.fromkeys(package for stack in failure.affected for package in stack.versions)
    have = ", ".join(f"{package} {versions.get(package, 'is not installed')}" for package in needed)
    stacks = dict.fromkeys(str(stack) for stack in failure.affected)
    return Affected(False, f"{have}; affected: {'; or '.join(stacks)}")


def upgrades(failure: Failure, versions: Mapping[str, str]) -> list[str]:
    """Return the upgrades of one package that end a failure and lead into no other, such as `trl 0.22.0 or later`.

    Nearly every step from one release to another ends one failure, and some begin another: with trl 0.14, transformers
    4.52 ends garbage rollouts and begins silent misalignment. So each is tried on the registry, at every version that
    it knows a change of.

    Args:
        failure: that these versions have.
        versions: package to version, as installed.
    """
    had = {other.id for other in all() if affected(other, versions)}
    cures: dict[str, list[str]] = {}
    for stack in failure.fixed:
        if stack.holds(versions) or len(stack.versions) != 1 or not set(stack.versions) <= set(versions):
            continue
        (package,) = stack.versions
        known = _changes(package)
        good = [
            version
            for version in known
            if Version(version) > Version(versions[package])
            and stack.holds(there := {**versions, package: version})
            and not affected(failure, there)
            and not any(affected(other, there) for other in all() if other.id not in had)
        ]
        if not good:
            continue
        first = known.index(good[0])
        bad = next((version for version in known[first:] if version not in good), None)
        what = ", ".join(filter(None, (stack.what, stack.only_where)))
        cures.setdefault(f"{package} {good[0]} or later{f', below {bad}' if bad else ''}", []).append(what)
    return [f"{upgrade} ({'; '.join(whats)})" for upgrade, whats in cures.items()]


def _changes(package: str) -> list[str]:
    """Return every version of a package at which the registry knows a change, in order."""
    texts = [
        text
        for failure in all()
        for stack in (*failure.affected, *failure.fixed)
        for name, text in stack.versions.items()
        if name == package
    ]
    return sorted({version for text in texts for version in re.findall(r"[\d.]+", text)}, key=Version)
