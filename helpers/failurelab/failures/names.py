"""From an error's text to the release in which a name came or went: unexpected keywords, imports, attributes.

The table `names.json` is read from the wheels of trl and transformers by `tools/release_names.py`: for each owner (a
module, a configuration, a method, a class) the releases that have a name, and what the last of them said of it.
`names.toml` has what no wheel says, with a source for each.
"""

import dataclasses
import difflib
import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from failurelab.failures.loader import release
from failurelab.failures.toml_table import read_toml

_FOLDER = pathlib.Path(__file__).parent
_CONFIGS = ("GRPOConfig", "OnlineDPOConfig", "RLOOConfig", "TrainingArguments")
_TRAINERS = ("GRPOTrainer", "OnlineDPOTrainer", "RLOOTrainer", "Trainer")
_CALL = r"(?:(?P<place>\w+)\.)?(?P<callee>\w+)\(\) "
_KEYWORD = re.compile(_CALL + r"got an unexpected keyword argument '(?P<name>\w+)'")
_MISSING = re.compile(_CALL + r"missing \d+ required (?:positional|keyword-only) arguments?: '(?P<name>\w+)'")
_TAKES = re.compile(_CALL + r"takes (?:from \d+ to )?\d+ positional arguments? but \d+ (?:was|were) given")
_IMPORT = re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<owner>(?:trl|transformers)[\w.]*)'")
_MODULE = re.compile(r"No module named '(?P<name>(?:trl|transformers)\.[\w.]+)'")
_OF_MODULE = re.compile(r"module '?(?P<owner>(?:trl|transformers)[\w.]*)'? has no attribute '(?P<name>\w+)'")
_ATTRIBUTE = re.compile(r"'(?P<place>\w+)' object has no attribute '(?P<name>\w+)'")
_INSTEAD = re.compile(
    r"from (?P<module>[\w.]+) import (?P<moved>\w+)|[Uu]se `(?P<name>\w+)` instead|instead use `(?P<other>\w+)`"
)
_PARSER = re.compile(r"(?:not used by the HfArgumentParser|Unknown arguments from config file): \[(?P<names>[^]]+)\]")


@dataclasses.dataclass(frozen=True)
class Name:
    """A name of an owner in a package, in the releases that have it.

    Attributes:
        package: `trl` or `transformers`.
        owner: a module, a configuration, a method or a class.
        name: the name.
        spans: the first and the last release of each time that it was there, the oldest first; None for one that is
            there in the newest release that was read.
        said: what the last release with it said of it; may be empty.
    """

    package: str
    owner: str
    name: str
    spans: tuple[tuple[str, str | None], ...]
    said: str = ""

    def there(self, version: str) -> bool:
        """Return whether a version has it."""
        at = release(version)
        return any(Version(a) <= at and (b is None or at < Version(self._after(b))) for a, b in self.spans)

    def _after(self, last: str) -> str:
        releases = table()[self.package]["releases"]
        after: str = releases[releases.index(last) + 1]
        return after

    def when(self) -> str:
        """Return in words when it was there: from which release, and in which it went."""
        oldest = table()[self.package]["releases"][0]
        words = []
        for first, last in self.spans:
            came = "" if first == oldest else f"came with {self.package} {first}"
            went = f"went with {self.package} {self._after(last)}" if last else ""
            always = f"is in all releases of {self.package} since {oldest}"
            words.append(" and ".join(filter(None, (came, went))) or always)
        return ", ".join(words)


@functools.cache
def table() -> dict[str, Any]:
    """Return the table of names, as the file has it."""
    read: dict[str, Any] = json.loads((_FOLDER / "names.json").read_text(encoding="utf-8"))
    return read


@functools.cache
def _notes() -> list[dict[str, Any]]:
    """Return what is written by hand: `text` (a regular expression), `write`, `source`."""
    notes: list[dict[str, Any]] = read_toml(_FOLDER / "names.toml")["note"]
    return notes


def find(owner: str, name: str) -> Name | None:
    """Return a name of an owner; None where no release that was read has it, or all have it and it is not listed."""
    for package, part in table().items():
        entry = part["names"].get(owner, {}).get(name)
        if entry:
            ends = (span.split("-") for span in entry[0].split(", "))
            return Name(package, owner, name, tuple((a, b or None) for a, b in ends), *entry[1:])
    return None


def explain(error: str, installed: Mapping[str, str] | None = None) -> str:
    """Return what an error about a name says of releases: where it came or went, what replaces it, what to write.

    Args:
        error: the error's text; other lines around it do not matter.
        installed: package to version, where they are known.

    Returns:
        One or more sentences; empty for an error of another kind, or about names of other libraries.
    """
    known = {}
    for package, version in (installed or {}).items():
        try:
            release(version)
        except InvalidVersion:
            continue
        known[package] = version
    parts = [_explain(error, known), *(note["write"] for note in _notes() if re.search(note["text"], error))]
    return " ".join(part for part in parts if part)


def replacement(error: str) -> str:
    """Return what takes the place of the name that an error speaks of: a name, or a module's (`torch.optim.AdamW`).

    That is what the last release with the name said, or what is written by hand; empty where neither names one.
    """
    if note := next((note for note in _notes() if "new" in note and re.search(note["text"], error)), None):
        return str(note["new"])
    match = _INSTEAD.search(_explain(error, {}))
    if match is None:
        return ""
    return f"{match['module']}.{match['moved']}" if match["moved"] else match["name"] or match["other"]


def unused_options(error: str) -> list[str]:
    """Return the options that no class of a parser takes, by its error, which may hold their values too."""
    match = _PARSER.search(error)
    return re.findall(r"--(\w+)", match["names"]) or re.findall(r"\w+", match["names"]) if match else []


def _explain(error: str, installed: Mapping[str, str]) -> str:
    if match := _IMPORT.search(error) or _OF_MODULE.search(error):
        name = find(match["owner"], match["name"]) or find("modules", f"{match['owner']}.{match['name']}")
        name = name or find("modules", match["owner"])
        return _tell([name] if name else [], installed)
    if match := _MODULE.search(error):
        name = find("modules", match["name"])
        return _tell([name] if name else [], installed)
    if names := unused_options(error):
        told = [_tell(_in_configs(name), installed) or _nearest("GRPOConfig", name) for name in names]
        return " ".join(filter(None, told))
    if match := _ATTRIBUTE.search(error):
        places = _family(match["place"])
        return _tell(filter(None, (find(place, match["name"]) for place in places)), installed, always=True)
    if match := _KEYWORD.search(error):
        return _keyword(match["place"] or "", match["callee"], match["name"], installed)
    if match := _MISSING.search(error):
        return _missing(match["place"] or "", match["callee"], match["name"], installed)
    if match := _TAKES.search(error):
        return _parameters(match["place"] or "", match["callee"], None, installed)
    return ""


def _family(place: str) -> list[str]:
    """Return the known classes that a class's name ends in, with the one that all inherit from; empty if none."""
    for kinds in (_CONFIGS, _TRAINERS):
        for known in kinds:
            if place.endswith(known):
                return list(dict.fromkeys([known, kinds[-1]]))
    return []


def _in_configs(name: str) -> list[Name]:
    found = (find(owner, name) for owner in ("GRPOConfig", "TrainingArguments"))
    return [entry for entry in found if entry]


def _keyword(place: str, callee: str, name: str, installed: Mapping[str, str]) -> str:
    """An unexpected keyword: of a configuration, of a trainer, of an overridden method, of a reward function."""
    family = _family(place or callee)
    if family and callee in ("__init__", place, *family):
        owners = family if family[-1] == "TrainingArguments" else [f"{owner}.__init__" for owner in family]
        found = [entry for entry in (find(owner, name) for owner in owners) if entry]
        return _tell(found, installed) or _nearest(owners[0], name)
    told = _parameters(place, callee, name, installed)
    passed = find("reward function", name)
    if told or not passed or callee in ("forward", "generate"):
        return told
    return f"A trainer passes `{name}` to reward functions ({passed.when()}): {callee} must take **kwargs."


def _missing(place: str, callee: str, name: str, installed: Mapping[str, str]) -> str:
    """An argument that was not given: to a trainer, to a method, to a reward function."""
    if callee == "__init__":
        return f"{place} needs `{name}`: pass it by its name." if _family(place) else ""
    told = _parameters(place, callee, name, installed)
    if not told and not place and "reward" in callee:
        return (
            f"Prompts, completions and the dataset's columns are passed to {callee}: there is no column `{name}`, "
            "or it was taken away before (remove_unused_columns=True, a map that drops it): F14."
        )
    return told


def _parameters(place: str, callee: str, name: str | None, installed: Mapping[str, str]) -> str:
    """What is known of a method's parameters: of its own class, else of the trainers' method of that name."""
    if callee == "__init__" and not _family(place):
        return ""
    when: dict[str, list[str]] = {}
    for owner in [f"{owner}.{callee}" for owner in _family(place) or ("GRPOTrainer", "Trainer")]:
        known: dict[str, Any] = next((part["names"][owner] for part in table().values() if owner in part["names"]), {})
        for entry in (find(owner, key) for key in known if name in (None, key)):
            if entry:
                when.setdefault(f"of {owner} {entry.when()}", []).append(f"`{entry.name}`")
    if not when:
        return ""
    told = ". ".join(f"{', '.join(entries)} {words}" for words, entries in when.items())
    have = ", ".join(f"{package} {installed[package]}" for package in table() if package in installed)
    return (
        f"{told}{f' (here: {have})' if have else ''}. Who calls {callee} and who defines it must be of releases that "
        "fit; an override takes what the installed release passes."
    )


def _tell(found: Iterable[Name], installed: Mapping[str, str], always: bool = False) -> str:
    """Return a sentence for each name that explains the error with what is installed, or for each one if `always`."""
    told = []
    for name in found:
        version = installed.get(name.package)
        if version and name.there(version) and not always:
            continue
        of = f"`{name.name}` of {name.owner}" if name.owner != "modules" else f"`{name.name}`"
        have = f" (here: {name.package} {version})" if version else ""
        told.append(f"{of} {name.when()}{have}.")
        if version and release(version) < Version(name.spans[0][0]):
            told.append(f"Upgrade {name.package}, or leave it out.")
        elif name.said:
            told.append(f"{name.package} said: {name.said.rstrip('.')}.")
    return " ".join(told)


def _nearest(owner: str, name: str) -> str:
    """Return what is near to a name that no release has."""
    owners = [owner, *(["TrainingArguments"] if owner.endswith("Config") else [])]
    there = {
        entry: package
        for each in owners
        for package, part in table().items()
        for entry, (spans, *_) in part["names"].get(each, {}).items()
        if spans.endswith("-")
    }
    if not there or any(find(each, name) for each in owners):
        return ""
    near = difflib.get_close_matches(name, there, n=2)
    shown = f" Near to it: {', '.join(f'`{entry}`' for entry in near)}." if near else ""
    releases = table()["trl"]["releases"]
    return f"No {owner.removesuffix('.__init__')} of trl {releases[0]} to {releases[-1]} takes `{name}`.{shown}"
