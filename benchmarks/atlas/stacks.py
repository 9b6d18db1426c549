"""Which stacks the atlas measures: each release of trl with what people could install on its day, and of transformers.

The day of a release is that of its upload, as the package index tells it.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import ssl
import subprocess
import sys
import urllib.error
import urllib.request

from packaging.version import InvalidVersion, Version

from failurelab.errors import FailureLabError

FROM = {"trl": Version("0.14"), "transformers": Version("4.45")}
MAIN = "main"  # in the place of a release: the branch that is developed
UPSTREAM = "https://github.com/huggingface/trl"
_LATER = datetime.timedelta(days=3)  # after a release, in which its faults of packaging are mended
_SIMPLE = "application/vnd.pypi.simple.v1+json"


class IndexUnreadable(FailureLabError):
    """A package index does not tell which releases there are, or of which day; the message says what to do."""

    exit_status = 3


@dataclasses.dataclass(frozen=True)
class Release:
    """One release of a package.

    Attributes:
        version: of it.
        day: on which its first file was uploaded.
    """

    version: Version
    day: datetime.date


@dataclasses.dataclass(frozen=True)
class Stack:
    """What one column of the atlas is measured in.

    Attributes:
        name: of its evidence, such as `trl-0.19.1` or `transformers-4.53.0`.
        pinned: the packages whose release is given, such as {"trl": "0.19.1"}.
        until: the last day whose releases are taken for all other packages.
        source: of trl's main branch, as an installer takes it; empty for a release.
    """

    name: str
    pinned: dict[str, str]
    until: datetime.date
    source: str = ""


def read_index(package: str) -> list[Release]:
    """Return the releases of a package that the atlas measures, in their order; without those that were taken back.

    Raises:
        IndexUnreadable: no index is reached, or it tells no days.
    """
    address = f"{_index()}/{package}/"
    request = urllib.request.Request(address, headers={"Accept": _SIMPLE})
    try:
        context = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT"))
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            files = json.load(answer)["files"]
    except (OSError, ValueError, KeyError) as error:
        raise IndexUnreadable(
            f"{address} does not tell the releases of {package} ({error}): the atlas is made from a package index. "
            "Next: check the network; what is measured already is kept"
        ) from error
    days: dict[Version, datetime.date] = {}
    for file in files:
        version = _version_of(file["filename"], package)
        if version is None or version.is_prerelease or file.get("yanked") or version < FROM.get(package, version):
            continue
        if "upload-time" not in file:
            raise IndexUnreadable(
                f"{address} tells no days of upload, so that nobody can know what went with a release then. "
                "Next: name an index that does, such as PyPI, in UV_INDEX_URL"
            )
        day = datetime.date.fromisoformat(file["upload-time"][:10])
        days[version] = min(day, days.get(version, day))
    return [Release(version, days[version]) for version in sorted(days)]


def _version_of(filename: str, package: str) -> Version | None:
    if not filename.startswith(f"{package.replace('-', '_')}-") or not filename.endswith(".whl"):
        return None
    try:
        return Version(filename.split("-")[1])
    except InvalidVersion:
        return None


def _index() -> str:
    if named := os.environ.get("UV_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX"):
        return named.rstrip("/")
    line = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    if said := subprocess.run(line, capture_output=True, text=True).stdout.strip():
        return said.rstrip("/")
    line = [sys.executable, "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"]
    if said := subprocess.run(line, capture_output=True, text=True).stdout.strip():
        return said.rstrip("/")  # what pip takes where nobody names another
    raise IndexUnreadable("this Python has no pip, which knows the package index. Next: name one in UV_INDEX_URL")


def main(source: str = UPSTREAM) -> Stack:
    """Return the stack of trl's main branch.

    Args:
        source: an address, and then with what can be installed today; or a folder with a git repository, bare or not,
            of which HEAD is taken, with what could be installed on that commit's day.

    Raises:
        IndexUnreadable: the folder has no git repository.
    """
    name, folder = f"trl-{MAIN}", pathlib.Path(source)
    if not folder.is_dir():
        return Stack(name, {"trl": MAIN}, datetime.date.today(), f"git+{source}@{MAIN}")
    line = ["git", "-C", str(folder), "log", "-1", "--format=%H %cs", "HEAD"]
    said = subprocess.run(line, capture_output=True, text=True)
    if said.returncode:
        why = " ".join(said.stderr.split())
        raise IndexUnreadable(f"{folder} has no commit of trl ({why}). Next: give a git repository, or an address")
    commit, day = said.stdout.split()
    until = datetime.date.fromisoformat(day) + _LATER
    return Stack(name, {"trl": MAIN}, until, f"git+file://{folder.resolve()}@{commit}")


def choose(trl: list[Release], transformers: list[Release]) -> list[Stack]:
    """Return all stacks: one for each release of trl, and one for each minor release of transformers.

    With a release of transformers goes the trl that was the newest on its day, or the first one that is measured.
    """
    stacks = [Stack(f"trl-{each.version}", {"trl": str(each.version)}, each.day + _LATER) for each in trl]
    firsts: dict[tuple[int, int], Release] = {}
    for each in transformers:
        firsts.setdefault((each.version.major, each.version.minor), each)
    for each in firsts.values():
        until = max(each.day, trl[0].day) + _LATER
        fitting = [release for release in trl if release.day <= until][-1]
        pinned = {"transformers": str(each.version), "trl": str(fitting.version)}
        stacks.append(Stack(f"transformers-{each.version}", pinned, until))
    return stacks
