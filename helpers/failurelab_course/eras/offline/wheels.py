"""A folder of wheels: what it holds, what a lock asks of it, and what is missing, before anything is installed.

Where there is no network, an era comes from wheels that were carried there. An installer that finds one wheel too few
says so after minutes, for one package, in its own words. Here every line of a lock is looked up first, by the file's
name (PEP 427: name, version, and the Pythons and platforms that it serves), and all that is missing is told at once.

Only the standard library is imported, and `packaging`, or the copy of it that every pip carries.
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import dataclasses
import email.parser
import importlib
import pathlib
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping

from failurelab_course.eras import EraError

# Newest glibc first: a wheel for an older one serves too.
_MANYLINUX = re.compile(r"manylinux_2_(\d+)_x86_64")
_LEGACY = {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"}


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One wheel of a folder: its normalised `name`, its `version` as text, and the file."""

    name: str
    version: str
    path: pathlib.Path

    @property
    def public(self) -> str:
        """The version without a build's own part: `2.13.0` of `2.13.0+cpu`."""
        return self.version.partition("+")[0]

    def requires(self) -> list[str]:
        """Return the requirements that its metadata names.

        Raises:
            EraError: the file was cut short.
        """
        try:
            with zipfile.ZipFile(self.path) as archive:
                name = next(each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
                metadata = email.parser.BytesHeaderParser().parsebytes(archive.read(name))
        except (OSError, zipfile.BadZipFile, StopIteration) as error:
            raise broken(self.path) from error
        return metadata.get_all("Requires-Dist") or []

    def unpacked_bytes(self) -> int:
        """Return how much disk its files take."""
        with zipfile.ZipFile(self.path) as archive:
            return sum(each.file_size for each in archive.infolist())


@dataclasses.dataclass(frozen=True)
class Target:
    """What wheels are for: a Python such as `3.11`, and a platform such as `manylinux_2_28_x86_64`."""

    python: str
    platform: str

    def platforms(self) -> list[str]:
        """Return the platforms whose wheels serve, best first.

        Raises:
            EraError: it is no Linux on x86-64.
        """
        found = _MANYLINUX.fullmatch(self.platform)
        if not found:
            raise EraError(
                f"unknown platform {self.platform!r}: a bundle is made for Linux on x86-64, elsewhere none was tried. "
                "Next: manylinux_2_28_x86_64, or another number of glibc that the machines have"
            )
        made = []
        for number in range(int(found[1]), 4, -1):
            made += [f"manylinux_2_{number}_x86_64"] + ([_LEGACY[number]] if number in _LEGACY else [])
        return [*made, "linux_x86_64"]

    def tags(self) -> set:
        """Return the tags of the wheels that serve, as `packaging` writes them."""
        tags, version = package("tags"), tuple(int(part) for part in self.python.split("."))
        interpreter = f"cp{version[0]}{version[1]}"
        return {
            *tags.cpython_tags(version, [interpreter], self.platforms()),
            *tags.compatible_tags(version, interpreter, self.platforms()),
        }

    def markers(self, release: str = "9") -> dict[str, str]:
        """Return the environment in which a lock's markers are read, for one release of that Python."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.{release}",
            "os_name": "posix",
            "platform_machine": "x86_64",
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{self.python}.{release}",
            "python_version": self.python,
            "sys_platform": "linux",
        }


def package(module: str):
    """Return a module of `packaging`, or of the copy inside pip.

    Raises:
        EraError: neither is there.
    """
    for name in ("packaging", "pip._vendor.packaging"):
        try:
            return importlib.import_module(f"{name}.{module}")
        except ModuleNotFoundError:
            continue
    raise EraError(
        f"{sys.executable} has neither packaging nor pip, so wheels cannot be told apart. Next: another Python, or "
        "put a wheel of pip into the folder of wheels"
    )


def normal(name: str) -> str:
    """Return a package's name as an index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def broken(path: pathlib.Path) -> EraError:
    """Return the error of a wheel that was cut short."""
    return EraError(
        f"{path.name} is no whole wheel: its download or copy was cut short. Next: copy it again, then the same command"
    )


def read(folder: pathlib.Path, target: Target | None = None) -> dict[tuple[str, str], Wheel]:
    """Return the wheels of `folder` that serve here, or on `target`, by name and public version.

    Raises:
        EraError: there is no such folder, no wheel in it, or a wheel that was cut short.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise EraError(f"{folder} is no folder. Next: give the folder that holds the wheels: --wheels DIR")
    pip = sorted(folder.glob("pip-*.whl"))
    if pip and str(pip[-1]) not in sys.path:
        sys.path.append(str(pip[-1]))  # its copy of `packaging`, for a Python that has none
    utils = package("utils")
    tags = target.tags() if target else set(package("tags").sys_tags())
    found: dict[tuple[str, str], Wheel] = {}
    every = sorted(folder.glob("*.whl"))
    for path in every:
        try:
            name, version, _, serves = utils.parse_wheel_filename(path.name)
        except ValueError:  # of `packaging`, or of pip's copy: both derive from it
            continue
        if not zipfile.is_zipfile(path):
            raise broken(path)
        if tags & serves:
            made = Wheel(str(name), str(version), path)
            found[made.name, made.public] = made
    if not found:
        what = f"none of its {len(every)} wheels serves Python {_here(target)}" if every else "it holds no wheel"
        raise EraError(f"{folder}: {what}. Next: failurelab pack where there is a network, for the Python of this one")
    return found


def _here(target: Target | None) -> str:
    return f"{target.python} on {target.platform}" if target else f"{sys.version_info[0]}.{sys.version_info[1]} here"


def lines(lock: pathlib.Path, target: Target | None = None, release: str = "9") -> dict[str, str]:
    """Return what a lock pins for this Python and platform, or for `target`: versions by normalised name."""
    requirement, environment = package("requirements").Requirement, target.markers(release) if target else None
    pinned = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            asked = requirement(line)
            if asked.marker is None or asked.marker.evaluate(environment):
                pinned[normal(asked.name)] = next(iter(asked.specifier)).version
    return pinned


def select(
    pinned: Mapping[str, str], folder: Mapping[tuple[str, str], Wheel], era: str, where: pathlib.Path
) -> list[Wheel]:
    """Return the wheel of every line of a lock.

    Raises:
        EraError: a line has none; names them.
    """
    missing = [f"{name}=={version}" for name, version in pinned.items() if (name, version) not in folder]
    if missing:
        raise absent(missing, era, where)
    return [folder[name, version] for name, version in pinned.items()]


def absent(missing: Iterable[str], era: str, where: pathlib.Path) -> EraError:
    """Return the error of wheels that are not there, or serve another Python."""
    missing = list(missing)
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return EraError(
        f"era {era}: {where} holds no wheel for Python {_here(None)} of {', '.join(missing[:5])}{more}. "
        "Next: failurelab pack where there is a network, and carry the folder here again"
    )
