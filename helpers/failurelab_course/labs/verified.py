"""Which labs need no new proof: nothing that decides about them has changed since all their states passed.

`labs/verified.json` holds for each lab hashes of its scripts, of its stack, and of the code that measures and judges
it (`failurelab verify --write`). Tests prove the labs whose hashes differ; nightly all are proved.
"""

import ast
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable

import tomllib

from failurelab_course import eras, state_file
from failurelab_course.labs.definition import Lab, LabError
from failurelab_course.labs.verify import PASS, ScriptOutcome

_LENGTH = 12
_CHECKER = "failurelab_course.labs.checker"
_ROOTS = (f"{_CHECKER}.server", f"{_CHECKER}.measure", "failurelab_course.labs.verify")


class LabHashes:
    """The hashes of labs as the tree at `root` has them now: the course's, or a copy."""

    def __init__(self, root: pathlib.Path | None = None):
        self.root = root or eras.root()
        self.file = self.root / "labs" / "verified.json"

    def of(self, lab: Lab) -> dict[str, str]:
        """Return the hashes of a lab's `scripts`, of its `stack`, and of the `code` that measures and judges it."""
        locks = [self.root / "eras" / f"{name}.txt" for name in (lab.era, "torch")]
        registry = self.root / "helpers" / "failurelab" / "failures"
        mechanisms = [tomllib.loads((registry / f"{id}.toml").read_text())["mechanism"] for id in lab.failures]
        return {
            "scripts": self._hash([lab.folder / "lab.toml", lab.start]),
            "stack": self._hash([*locks, *(self.root / "models" / "tiny-qwen2").glob("*.*")]),
            "code": self._hash(self.code(lab), json.dumps(mechanisms)),
        }

    def code(self, lab: Lab) -> set[pathlib.Path]:
        """Return the course's own files that are imported where the lab is measured and judged."""
        waiting = {*_ROOTS, f"{_CHECKER}.kinds.{lab.kind}"}
        for script in (lab.broken, *lab.wrong_fixes, lab.solution):
            try:
                waiting |= _imported(script.text())
            except (LabError, SyntaxError):  # its hash differs, and `verify` tells it
                continue
        files: set[pathlib.Path] = set()
        while waiting:
            parts = waiting.pop().split(".")
            for length in range(1, len(parts) + 1):
                path = self._module(*parts[:length])
                if path and path not in files:
                    files.add(path)
                    waiting |= self._imports(path)
        return files

    @functools.cache  # noqa: B019  labs share nearly all files, and this object is soon gone
    def _module(self, *parts: str) -> pathlib.Path | None:
        path = self.root.joinpath("helpers", *parts)
        return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)

    @functools.cache  # noqa: B019
    def _imports(self, path: pathlib.Path) -> frozenset[str]:
        return frozenset(_imported(path.read_text(encoding="utf-8")))

    @functools.cache  # noqa: B019
    def _line(self, path: pathlib.Path) -> str:
        return f"{path.relative_to(self.root)} {hashlib.sha256(path.read_bytes()).hexdigest()}"

    def _hash(self, files: Iterable[pathlib.Path], more: str = "") -> str:
        return hashlib.sha256("\n".join([*map(self._line, sorted(files)), more]).encode()).hexdigest()[:_LENGTH]

    def changed(self, labs: Iterable[Lab]) -> dict[str, list[str]]:
        """Return the labs whose proof is out of date, by name, and which of their parts have changed."""
        proved, changed = self.read(), {}
        for lab in labs:
            kept = proved.get(lab.name, "")
            for number, (part, value) in enumerate(self.of(lab).items()):
                if kept[number * _LENGTH :][:_LENGTH] != value:
                    changed.setdefault(lab.name, []).append(part)
        return changed

    def read(self) -> dict[str, str]:
        """Return the three hashes of each lab that was proved, as one text.

        Raises:
            LabError: the file cannot be read.
        """
        return state_file.read(self.file, lambda why: LabError(f"{self.file}: {why}. Next: make verify")) or {}

    def write(self, hashes: dict[str, dict[str, str]], matrix: Iterable[ScriptOutcome], there: Iterable[str]) -> None:
        """Keep the hashes, as they were before the scripts ran, of the labs all of whose scripts passed."""
        kept = set(there) - {row.lab for row in matrix if row.result != PASS}
        texts = self.read() | {name: "".join(value.values()) for name, value in hashes.items()}
        proved = {name: text for name, text in texts.items() if name in kept}
        state_file.write(self.file, json.dumps(proved, indent=1, sort_keys=True) + "\n")


def _imported(text: str) -> set[str]:
    """Return the names of the house's modules that a source imports, also inside its functions."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("failurelab")}
