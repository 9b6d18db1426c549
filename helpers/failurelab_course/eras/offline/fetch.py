"""Fetch the wheels of eras, for this Python or another one: what `failurelab pack` puts into a bundle.

pip chooses wheels for another Python or platform, but reads a lock's markers for the Python that runs it. So the lines
that apply are picked here, and pip is given plain versions. What an index holds as source alone (DeepSpeed) is built;
such a wheel must serve every Python. Nothing is fetched twice: what a broken-off run left is taken.
"""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping

from failurelab_course import eras
from failurelab_course.eras import Era, EraError, installers
from failurelab_course.eras.offline import machine_torch as own_torch
from failurelab_course.eras.offline import wheels
from failurelab_course.eras.offline.wheels import Target

# An index has these as source alone.
SOURCE_ONLY = ("deepspeed",)
# A lock's markers can tell an early release of a Python from a late one, and a bundle serves both.
RELEASES = ("0", "9")
# Large, and of no use to a run without notebooks; left out of a smallest folder unless asked for.
LARGE = ("bitsandbytes", "deepspeed", "uv", "ruff", "jupyterlab")


def pinned(chosen: Iterable[Era], target: Target) -> dict[str, set[str]]:
    """Return what the locks of these eras pin for the target: versions by name, for its early and late releases."""
    found: dict[str, set[str]] = {}
    for era in chosen:
        for release in RELEASES:
            for name, version in wheels.lines(era.lock, target, release).items():
                found.setdefault(name, set()).add(version)
    return found


def fetch(folder: pathlib.Path, wanted: Mapping[str, set[str]], target: Target, say) -> None:
    """Bring a wheel of every name and version into `folder`, unless it is there.

    Raises:
        EraError: no network, or no wheel serves the target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: versions - _there(folder, target, name) for name, versions in wanted.items()}
    rounds: list[dict[str, str]] = []
    for name, versions in missing.items():
        for version in sorted(versions):
            # pip takes one version of a package at once
            place = next((each for each in rounds if name not in each), None)
            if place is None:
                rounds.append(place := {})
            place[name] = version
    for place in rounds:
        binary = [f"{name}=={version}" for name, version in place.items() if name not in SOURCE_ONLY]
        say(f"{len(binary)} wheels are fetched for Python {target.python} on {target.platform}")
        if binary:
            _pip(["download", *_serving(target), "-d", str(folder), *binary], f"{len(binary)} wheels", folder)
        for name in (each for each in SOURCE_ONLY if each in place):
            say(f"{name} {place[name]} is built: an index holds its source alone")
            _build(folder, f"{name}=={place[name]}", target)


def fetch_torch(folder: pathlib.Path, target: Target, index: str, say) -> None:
    """Bring torch's build for CPUs into `folder`: from PIP_FIND_LINKS, or from `index`.

    Raises:
        EraError: neither is given, or it holds no such wheel. An index of all packages is never asked: its torch
            brings gigabytes for GPUs.
    """
    (version,) = wheels.lines(eras.root() / "eras" / "torch.txt").values()
    if version in _there(folder, target, "torch"):
        return
    links = os.environ.get("PIP_FIND_LINKS", "")
    if not (index or links):
        raise EraError(
            f"no build of torch {version} for CPUs is at hand. Next: --torch-index URL, the index of CPU builds that "
            "PyTorch's page on installing names; or PIP_FIND_LINKS with a folder that holds the wheel; or "
            "--without torch, where the machine has its own"
        )
    say(f"torch {version} is fetched")
    place = ["--index-url", index] if index else ["--no-index", "--find-links", links]
    _pip(["download", *_serving(target), *place, "-d", str(folder), f"torch=={version}"], f"torch {version}", folder)


def fetch_pip(folder: pathlib.Path, say) -> None:
    """Bring pip's own wheel: an installer for a machine that has none."""
    if not list(folder.glob("pip-*.whl")):
        say("pip's own wheel is fetched")
        _pip(["download", "--no-deps", "--only-binary=:all:", "-d", str(folder), "pip>=25"], "pip", folder)


def _there(folder: pathlib.Path, target: Target, name: str) -> set[str]:
    spelled = re.sub("[-_.]", "[-_.]", name)
    if not any(re.match(rf"{spelled}-", path.name, re.IGNORECASE) for path in folder.glob("*.whl")):
        return set()
    return {version for each, version in wheels.read(folder, target) if each == name}


def _serving(target: Target) -> list[str]:
    short = target.python.replace(".", "")
    abis = [option for abi in (f"cp{short}", "abi3", "none") for option in ("--abi", abi)]
    platforms = [option for name in target.platforms() for option in ("--platform", name)]
    python = ["--python-version", f"{target.python}.{RELEASES[-1]}", "--implementation", "cp"]
    return ["--no-deps", "--only-binary=:all:", *python, *abis, *platforms]


def _build(folder: pathlib.Path, line: str, target: Target) -> None:
    before = set(folder.glob("*.whl"))
    _pip(["wheel", "--no-deps", "-w", str(folder), line], line, folder)
    for made in set(folder.glob("*.whl")) - before:
        if not made.name.endswith("-none-any.whl"):
            made.unlink()
            raise EraError(
                f"{line} was built into {made.name}, which serves this Python alone, and not {target.python} elsewhere."
                " Next: run this with DS_BUILD_OPS=0 in the environment"
            )


def _pip(arguments: list[str], what: str, folder: pathlib.Path) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--retries", "2", "--no-input"]
    done = subprocess.run(command, env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True)
    if not done.returncode:
        return
    said = done.stderr + done.stdout
    again = f"What was fetched is kept in {folder}. Next: "
    if installers.NO_SPACE.search(said):
        raise EraError(f"no space is left on the disk while fetching {what}. {again}free some, then the same command")
    absent = re.search(r"No matching distribution found for (\S+)", said)
    if installers.NO_NETWORK.search(said):
        raise EraError(
            f"{what}: the package index was not reached, and packing needs it. {again}check the network or the proxy, "
            "then the same command"
        )
    if absent:
        raise EraError(
            f"no wheel of {absent[1]} serves this Python and platform, and it is not built here. {again}another "
            "--python or --platform, or a lock that pins a version with one"
        )
    last = next((line.strip() for line in reversed(said.splitlines()) if "error" in line.lower()), "no message")
    raise EraError(f"{what} could not be fetched: {last[:300]}. {again}the same command again")


def smallest(
    folder: pathlib.Path, chosen: Iterable[Era], target: Target, have: Mapping[str, str], also: Iterable[str]
) -> set[pathlib.Path]:
    """Return the wheels that a machine with torch and the packages in `have` needs, of all that are in `folder`.

    A package of the machine will do if it is none of the libraries under study, satisfies what all others require, and
    requires nothing itself that comes as a wheel in another version.
    """
    found, kept = wheels.read(folder, target), set()
    for era in chosen:
        for release in RELEASES:
            lock = wheels.lines(era.lock, target, release)
            here = {name: found[name, version] for name, version in lock.items() if (name, version) in found}
            kept |= {here[name].path for name in _needed(era, lock, here, target, have, also)}
    return kept | (set() if "pip" in have else set(folder.glob("pip-*.whl")))


def _needed(era: Era, lock, here, target: Target, have, also) -> set[str]:
    requirement = wheels.package("requirements").Requirement
    waiting = [(name, "") for name in own_torch.required(era, also, lock) if name in lock]
    edges, asked = {}, {}
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in edges or name not in here:
            if name in lock and name not in here:
                raise wheels.absent([f"{name}=={lock[name]}"], era.name, pathlib.Path("the folder"))
            continue
        lines = [requirement(line) for line in here[name].requires()]
        environment = {**target.markers(), "extra": extra}
        lines = [each for each in lines if each.marker is None or each.marker.evaluate(environment)]
        edges[name, extra] = {wheels.normal(each.name) for each in lines}
        for each in lines:
            other = wheels.normal(each.name)
            asked.setdefault(other, []).append(each.specifier)
            waiting += [(other, more) for more in ("", *each.extras)]
    names = {name for name, _ in edges}

    def unfit(name: str) -> bool:
        if name in own_torch.NEVER_OTHER:
            return have.get(name) != lock[name]
        fits = name in have and all(each.contains(have[name], prereleases=True) for each in asked.get(name, ()))
        return not fits

    sent = {name for name in names if unfit(name)}
    while True:
        changed = {name for name in sent if have.get(name) != lock[name]}
        more = {name for (name, _), below in edges.items() if name not in sent and below & changed}
        if not more:
            return sent
        sent |= more
