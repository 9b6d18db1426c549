"""In which releases of trl and transformers a name is there: `helpers/failurelab/failures/names.json`, from the wheels.

    python tools/release_names.py [--wheels FOLDER] [--write]

Asks the package index for the releases, downloads each wheel that FOLDER does not have (92 of them, 450 MB; `pip
download --no-deps`), and reads it as text: nothing is installed or imported. Of trl all releases from 0.14 on are read,
of transformers the first of each minor one from 4.45 on. `--write` writes the table; without it, differences are
printed, and the exit status is 1 where there are any.

The table has for each package its releases in order, and by owner the names that were not there all the time, each
with the releases of its first and last appearance. An owner is a module (`trl`, `trl.trainer.utils`), whose names can
be imported; a configuration (`GRPOConfig`), whose names are its fields; a method (`GRPOTrainer.compute_loss`), whose
names are its parameters; a class (`GRPOTrainer`), whose names are its methods and attributes; `reward function`, whose
names are what a trainer passes to it; and `modules`. What a release said of a name before it went is kept beside it.
"""

import argparse
import ast
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

TABLE = pathlib.Path(__file__).resolve().parents[1] / "helpers/failurelab/failures/names.json"
FROM = {"trl": Version("0.14"), "transformers": Version("4.45")}
CLASSES = {
    "trl": ("GRPOConfig", "GRPOTrainer", "OnlineDPOConfig", "OnlineDPOTrainer", "RLOOConfig", "RLOOTrainer"),
    "transformers": ("TrainingArguments", "Trainer"),
}
MODULES = {  # whose code is read; of the others only what they export
    "trl": ("trl/",),
    "transformers": ("transformers/__init__.py", "transformers/trainer", "transformers/training_args.py"),
}
_WENT = re.compile(r"deprecated|removed|renamed|located|moved", re.IGNORECASE)


def find_releases(package: str) -> list[str]:
    """Return the releases that are read, in order, as the package index has them."""
    line = [sys.executable, "-m", "pip", "index", "versions", package]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    listed = re.search(r"Available versions: (.+)", said)
    if not listed:
        raise SystemExit(f"the package index lists no versions of {package}")
    releases = sorted({Version(text) for text in listed[1].split(", ")})
    releases = [release for release in releases if release >= FROM[package] and not release.is_prerelease]
    if package == "transformers":
        firsts: dict[tuple[int, int], Version] = {}
        for release in releases:
            firsts.setdefault((release.major, release.minor), release)
        releases = list(firsts.values())
    return [str(release) for release in releases]


def find_wheel(package: str, release: str, folder: pathlib.Path) -> pathlib.Path:
    """Return a release's wheel, downloaded if the folder does not have it."""
    if not list(folder.glob(f"{package}-{release}-*.whl")):
        line = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
        subprocess.run([*line, "-d", str(folder), f"{package}=={release}"], check=True)
    return next(folder.glob(f"{package}-{release}-*.whl"))


class Wheel:
    """The names in a wheel, and what it says of those that are to go; `says` are pairs of a class and a text."""

    def __init__(self, path: pathlib.Path, package: str):
        self.package = package
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") and name.startswith(f"{package}/")]
            read = [name for name in names if name.startswith(MODULES[package])]
            self._trees = {_module(name): ast.parse(archive.read(name)) for name in read}
            others = [name for name in names if name not in read and not _is_of_a_model(_module(name))]
            exported = {name for path in others for name in _exported(archive.read(path))}
            models = [name for name in names if _is_of_a_model(_module(name))]
            self.of_models = {name for path in models for name in _exported(archive.read(path))}
        self.says = [
            (node.name, text)
            for tree in self._trees.values()
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            for text in _texts(node)
        ]
        self.names = self._names(exported)
        self._trees = {}

    def _names(self, exported: set[str]) -> dict[str, set[str]]:
        """Return the names of each owner; `exported` are those of modules that are not read."""
        stable = {module: tree for module, tree in self._trees.items() if ".experimental." not in module}
        owners = {
            module: {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            for module, tree in stable.items()
        }
        owners["modules"] = set(stable)
        top = self._trees[self.package]
        own = [node for node in top.body if isinstance(node, ast.ImportFrom)]  # of a lazy module, for itself
        public = [node for node in ast.walk(top) if isinstance(node, ast.ImportFrom) and node not in own]
        public = [node for node in public if node.level and not _is_of_a_model(node.module or "")]
        owners[self.package] = {name.asname or name.name for node in public for name in node.names} | exported
        owners[self.package] = {name for name in owners[self.package] if not name.startswith("_")}
        for name in CLASSES[self.package]:
            owners |= self._class(name)
        return {owner: names - {"*"} for owner, names in owners.items()}

    def _class(self, name: str) -> dict[str, set[str]]:
        owners: dict[str, set[str]] = {name: set()}
        passed_on = {f"{name}.__init__"}  # methods that pass what they get to the base's
        for node in self._with_bases(name):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id[0] != "_":
                    owners[name].add(part.target.id)
                if not isinstance(part, ast.FunctionDef):
                    continue
                method = f"{name}.{part.name}"
                for old, new in _renamed_by_decorator(part):  # taken until the decorator goes
                    owners.setdefault(method, set()).add(old)
                    self.says.append((name, f"`{old}` is deprecated and renamed: use `{new}` instead."))
                    passed_on.add(method)
                if method not in owners or method in passed_on:
                    arguments = part.args.posonlyargs + part.args.args + part.args.kwonlyargs
                    owners.setdefault(method, set()).update({argument.arg for argument in arguments} - {"self", "cls"})
                    if not (part.args.vararg and part.args.kwarg):
                        passed_on.discard(method)
                if "Config" not in name and name != "TrainingArguments":
                    owners[name] |= {part.name, *_stored(part, ast.Attribute, "self")}
            if name == "GRPOTrainer":
                owners.setdefault("reward function", set()).update(_passed_to_rewards(node))
        return owners

    def _with_bases(self, name: str) -> Iterator[ast.ClassDef]:
        """Yield a class, and those of its bases that the wheel has; a class of its name in the stable part is first."""
        found = [
            (module, node)
            for module, tree in self._trees.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
        found.sort(key=lambda place: "experimental" in place[0])
        for module, node in found[:1]:
            yield node
            imported = {
                alias.asname or alias.name: alias.name
                for part in ast.walk(self._trees[module])
                if isinstance(part, ast.ImportFrom)
                for alias in part.names
            }
            for base in node.bases:
                original = imported.get(base.id, base.id) if isinstance(base, ast.Name) else ""
                if original == name:  # the stable part's name for a class that was moved
                    yield from (other for place, other in found if place != module)
                else:
                    yield from self._with_bases(original)

    def said_of(self, owner: str, name: str) -> str:
        """Return what the wheel says of a name that is to go; empty where it says nothing."""
        goes = re.compile(rf"`{re.escape(name)}[`(=][^.]*?(?:deprecated|located|renamed|moved|removed)", re.IGNORECASE)
        places = (owner.partition(".")[0], name)
        said = [text for place, text in self.says if place in places and goes.search(text)]
        return " ".join(min(said, key=len).split()) if said else ""


def _module(path: str) -> str:
    return path[:-3].replace("/", ".").removesuffix(".__init__")


def _is_of_a_model(module: str) -> bool:
    """Return whether a module of transformers is of one architecture: thousands of names that come and go with it."""
    return re.search(r"\bmodels\.(?!auto\b)\w", module) is not None


def _exported(source: bytes) -> list[str]:
    """Return the names of a module's `__all__`, where it is a list of literals."""
    found = re.search(rb"^__all__ = (\[[^]]*\])", source, re.MULTILINE)
    try:
        return [name for name in ast.literal_eval(found[1].decode()) if isinstance(name, str)] if found else []
    except (ValueError, SyntaxError):
        return []


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts in a piece of code that say that something goes, but no docstrings."""
    for part in ast.walk(node):
        text = ""
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text = part.value
        elif isinstance(part, ast.JoinedStr):
            text = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "…" for piece in part.values)
        if _WENT.search(text) and "\n" not in text.strip() and len(text) < 500:
            yield text


def _renamed_by_decorator(method: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield the old and the new name of each parameter that `@deprecate_kwarg` renames."""
    for node in method.decorator_list:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "deprecate_kwarg":
            new = [key.value for key in node.keywords if key.arg == "new_name"]
            if isinstance(node.args[0], ast.Constant) and new and isinstance(new[0], ast.Constant):
                yield str(node.args[0].value), str(new[0].value)


def _stored(node: ast.AST, kind: type[ast.Attribute] | type[ast.Subscript], of: str) -> Iterator[Any]:
    """Yield the places of `of` that a piece of code sets: `self.name`, or `reward_kwargs["name"]`."""
    for part in ast.walk(node):
        is_set = isinstance(part, kind) and isinstance(part.ctx, ast.Store)
        if is_set and isinstance(part.value, ast.Name) and part.value.id == of:
            yield part.attr if isinstance(part, ast.Attribute) else getattr(part.slice, "value", None)


def _passed_to_rewards(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "reward_func":
            yield from (keyword.arg for keyword in part.keywords if keyword.arg)
    yield from (name for name in _stored(node, ast.Subscript, "reward_kwargs") if isinstance(name, str))


def make_table(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return the table, from the wheels of all releases."""
    table: dict[str, dict[str, Any]] = {}
    for package in FROM:
        wheels = {}
        for release in find_releases(package):
            wheels[release] = Wheel(find_wheel(package, release, folder), package)
            print(package, release, file=sys.stderr)
        owners = {owner: _of_owner(owner, wheels) for owner in sorted({o for w in wheels.values() for o in w.names})}
        table[package] = {"releases": [*wheels], "names": {owner: names for owner, names in owners.items() if names}}
    inherited = table["transformers"]["names"]["TrainingArguments"]
    always = {name for name, (spans, *_) in inherited.items() if spans == f"{FROM['transformers']}.0-"}
    for owner, names in table["trl"]["names"].items():
        if owner.endswith("Config"):  # what it sets anew is there by inheritance too
            table["trl"]["names"][owner] = {name: told for name, told in names.items() if name not in always}
    return table


def _of_owner(owner: str, wheels: dict[str, Wheel]) -> dict[str, list[str]]:
    """Return an owner's names: the releases that have each, and what was said of it before it went.

    Left out are names that are there in all releases, but for configurations and for what trainers are made with; and
    of what transformers exports what came, and what was for TensorFlow and JAX, which all went.
    """
    releases, names = [*wheels], {}
    whole = owner.endswith(("Config", "__init__")) or owner in ("TrainingArguments", "reward function", "trl")
    for name in sorted(set().union(*(wheel.names.get(owner, set()) for wheel in wheels.values()))):
        spans = _spans([name in wheel.names.get(owner, ()) for wheel in wheels.values()])
        last = spans[-1][1]
        gone = last + 1 < len(releases)
        if not whole and spans == [(0, len(releases) - 1)]:
            continue
        if owner == "transformers" and (
            not gone
            or name in wheels[releases[-1]].of_models
            or re.match("TF|Flax|FLAX|is_|dummy_|logging$|[A-Z_]+_ARCHIVE_", name)
        ):
            continue
        shown = ", ".join(f"{releases[a]}-{releases[b] if b + 1 < len(releases) else ''}" for a, b in spans)
        said = wheels[releases[last]].said_of(owner, name) if gone else ""
        names[name] = [shown, said] if said else [shown]
    return names


def _as_text(table: dict[str, dict[str, Any]]) -> str:
    """Return the table as JSON, one name a line, so that a difference can be read."""
    packages = []
    for package, part in table.items():
        owners = [
            f"  {json.dumps(owner)}: {{\n"
            + ",\n".join(f"   {json.dumps(name)}: {json.dumps(told)}" for name, told in names.items())
            + "\n  }"
            for owner, names in part["names"].items()
        ]
        listed = ",\n".join(owners)
        packages.append(f' "{package}": {{"releases": {json.dumps(part["releases"])}, "names": {{\n{listed}\n }}}}')
    return "{\n" + ",\n".join(packages) + "\n}\n"


def _spans(there: list[bool]) -> list[tuple[int, int]]:
    """Return the first and last index of each run of true values."""
    spans: list[tuple[int, int]] = []
    for index, value in enumerate(there):
        if value and spans and spans[-1][1] == index - 1:
            spans[-1] = (spans[-1][0], index)
        elif value:
            spans.append((index, index))
    return spans


def main() -> int:
    """Read the wheels; write the table, or tell what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=pathlib.Path, help="a folder that keeps the wheels; else they are thrown away")
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.wheels or pathlib.Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        table = make_table(folder)
    text = _as_text(table)
    if options.write:
        TABLE.write_text(text, encoding="utf-8")
        return 0
    before = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    changed = sorted(set(text.splitlines()) ^ set(before))
    print("\n".join(changed) or "nothing changed")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
