"""An era with the machine's own torch: on a cluster without a network, whose torch was built for its GPUs.

Such a machine has one Python with torch and some of what the locks name, in other versions; the rest comes from a
folder of wheels. The libraries under study must be the lock's exactly, for a failure is told by their versions. Others
may be the machine's, if the requirements of all that is chosen hold; which ones is said, and kept in the era's marker.
How the era then sees them is in `era_links`. Only the standard library is needed, and `packaging` (see `wheels`).
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping

from failurelab_course import eras
from failurelab_course.eras import Era, EraError
from failurelab_course.eras.install import Plan, Source
from failurelab_course.eras.offline import links as era_links
from failurelab_course.eras.offline import wheels

STUDIED = ("trl", "transformers", "peft", "accelerate")
NEVER_OTHER = (*STUDIED, "deepspeed", "bitsandbytes")
COMMAND = ("typer", "rich", "psutil")  # what the command line needs, in the course's own environment
NOTEBOOKS = ("papermill", "nbconvert", "ipykernel", "jupyter-client", "matplotlib", "ipywidgets")
GROUPS = {"notebooks": NOTEBOOKS}


@dataclasses.dataclass(frozen=True)
class Pick:
    """One distribution that was chosen; `wheel` is None for one of the machine."""

    name: str
    version: str
    requires: tuple[str, ...]
    wheel: wheels.Wheel | None = None

    @property
    def told(self) -> str:
        """What it is called in an error."""
        return f"{self.name} {self.version}{'' if self.wheel else ' of this Python'}"


class _Conflict(Exception):
    """A wheel does not fit what the machine's packages require, and the machine's own of that name might."""

    def __init__(self, name: str):
        self.name = name


def plan(era: Era, folder: Mapping[tuple[str, str], wheels.Wheel], source: Source) -> Plan:
    """Choose what an era is made from: wheels where they are, else what this Python has and fits.

    Raises:
        EraError: no torch here, an unknown package in `source.also`, or a wheel is missing.
    """
    have = era_links.installed()
    if "torch" not in have:
        raise EraError(
            f"{sys.executable} has no torch, and --torch here takes it from there. Next: run this with the Python that "
            "holds torch, or drop --torch here and put a wheel of torch into the folder"
        )
    pinned = wheels.lines(era.lock)
    machine = {name: Pick(name, each.version, tuple(each.requires or ())) for name, each in have.items()}
    chooser = Chooser(pinned, {each.name: each for each in folder.values() if pinned.get(each.name) == each.public})
    chosen, left_out = chooser.choose(machine, required(era, source.also, pinned), asked_for(era))
    linked = {name: have[name] for name, pick in chosen.items() if pick.wheel is None}
    pinned |= wheels.lines(era.lock.parent / "torch.txt")
    other = {
        name: each.version
        for name, each in sorted(linked.items())
        if name in pinned and each.version.partition("+")[0] != pinned[name]
    }
    return Plan([pick.wheel for pick in chosen.values() if pick.wheel], linked, other, left_out)


def required(era: Era, also: Iterable[str], pinned: Mapping[str, str]) -> list[str]:
    """Return what an era cannot do without, with what was asked for; a group's names that its lock lacks are passed.

    Raises:
        EraError: no lock and no group has such a package.
    """
    more = [wheels.normal(name) for each in also for name in GROUPS.get(each, (each,))]
    every = {name for each in eras.known() for name in wheels.lines(each.lock)}
    if unknown := [name for name in more if name not in every]:
        raise EraError(
            f"--with {', '.join(unknown)}: no era's lock names it. Next: one of {', '.join(GROUPS)}, deepspeed, "
            "bitsandbytes, or another package of eras/*.in"
        )
    command = COMMAND if era.name == eras.TODAY else ()
    wanted = ["torch", *STUDIED, "packaging", *command, *more]
    return [name for name in dict.fromkeys(wanted) if name in pinned or name == "torch"]


def _required(pick: Pick, extra: str) -> list:
    """Return what a distribution requires here, with one of its extras."""
    found = []
    for line in pick.requires:
        try:
            each = wheels.package("requirements").Requirement(line)
        except ValueError:  # an old package of the machine's may spell a requirement as nothing reads it today
            continue
        if each.marker is None or each.marker.evaluate({"extra": extra}):
            found.append(each)
    return found


def asked_for(era: Era) -> list[str]:
    """Return the names in the era's `.in` file."""
    text = era.lock.with_suffix(".in").read_text(encoding="utf-8")
    return [wheels.normal(name) for name in re.findall(r"^([A-Za-z0-9][\w.-]*)", text, re.MULTILINE)]


@dataclasses.dataclass
class Chooser:
    """Chooses distributions that fit together. `here` are the wheels of the lock's versions, by name."""

    pinned: Mapping[str, str]
    here: Mapping[str, wheels.Wheel]

    def choose(
        self, machine: Mapping[str, Pick], required: Iterable[str], optional: Iterable[str]
    ) -> tuple[dict[str, Pick], list[str]]:
        """Return what is chosen by name, and which of `optional` are left out for want of a wheel.

        Raises:
            EraError: something required is missing; names the wheels.
        """
        self.machine, self.avoid = machine, set()
        required = list(required)
        while True:
            try:
                chosen, missing = self._closure({}, required)
                break
            except _Conflict as conflict:
                self.avoid.add(conflict.name)
        if missing:
            told = "; ".join(f"{name} ({why})" for name, why in list(missing.items())[:4])
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise EraError(
                f"wheels are missing: {told}{more}. Next: failurelab pack --wheels-only --without torch --have FILE, "
                "where there is a network and FILE is this Python's pip list --format=freeze"
            )
        left_out = []
        for name in optional:
            try:
                more, missing = self._closure(chosen, [name])
            except _Conflict:
                missing = {name: ""}
            if missing:
                left_out.append(name)
            else:
                chosen = more
        return chosen, left_out

    def _closure(self, chosen: Mapping[str, Pick], roots: Iterable[str]) -> tuple[dict[str, Pick], dict[str, str]]:
        """Return `chosen` with the roots and all that they require, and what is missing: names with reasons."""
        made, missing, seen = dict(chosen), {}, set()
        requirement = wheels.package("requirements").Requirement
        waiting = [(requirement(name), None) for name in roots]
        while waiting:
            asked, by = waiting.pop()
            name = wheels.normal(asked.name)
            if name not in made:
                pick = self._pick(name)
                if pick is None:
                    if by is None or by.wheel is not None:  # what the machine lacks itself is its own affair
                        missing.setdefault(self._wheel(name), self._why(name, asked, by))
                    continue
                made[name] = pick
            pick = made[name]
            if by is not None and not self._fits(asked, pick, by):
                missing.setdefault(*self._unfit(asked, pick, by))
            for extra in ("", *asked.extras):
                if (name, extra) not in seen:
                    seen.add((name, extra))
                    waiting += [(each, pick) for each in _required(pick, extra)]
        return made, missing

    def _pick(self, name: str) -> Pick | None:
        wheel = self.here.get(name)
        if wheel is not None and name not in self.avoid:
            return Pick(name, wheel.version, tuple(wheel.requires()), wheel)
        found = self.machine.get(name)
        if found is None or (name in NEVER_OTHER and found.version != self.pinned.get(name)):
            return None
        return found

    def _fits(self, asked, pick: Pick, by: Pick) -> bool:
        if by.wheel is None and pick.wheel is None:
            return True  # what the machine's own packages make of each other is its own affair
        return asked.specifier.contains(pick.version, prereleases=True)

    def _unfit(self, asked, pick: Pick, by: Pick) -> tuple[str, str]:
        own = self.machine.get(pick.name)
        fits = own is not None and (by.wheel is None or asked.specifier.contains(own.version, prereleases=True))
        if pick.wheel is not None and fits and pick.name not in NEVER_OTHER:
            raise _Conflict(pick.name)
        # A package of the machine that cannot live with the lock's versions must come as a wheel itself.
        name = pick.name if pick.wheel is None else by.name
        return self._wheel(name), f"{by.told} requires {asked}, and {pick.told} is here"

    def _wheel(self, name: str) -> str:
        return f"{name}=={self.pinned[name]}" if name in self.pinned else name

    def _why(self, name: str, asked, by: Pick | None) -> str:
        have = f", and this Python has {self.machine[name].version}" if name in self.machine else ""
        if name in NEVER_OTHER:
            return f"a library under study must be the lock's{have}"
        return f"{by.told} requires {asked}" if by else "it must be there"
