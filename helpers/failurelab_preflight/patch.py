"""A unified diff, applied to the texts of files in memory: an edit of the user's, or of an agent's. No file is changed.

A hunk is found by its lines. Where it stands by its line number it is taken there, else at the one other place that
holds them, for people and models count lines wrongly. Line ends are those of the file.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Sequence

from failurelab.errors import FailureLabError
from failurelab_preflight.answer import COMMAND_LINE
from failurelab_preflight.finding import Change


class PatchError(FailureLabError):
    """An edit does not apply; the message says which part of it, why, and the next step."""

    exit_status = 4


@dataclasses.dataclass
class Hunk:
    """Lines of a diff that stand together, each with its mark: a blank, `-` or `+`; `line` is where they begin."""

    line: int
    lines: list[str] = dataclasses.field(default_factory=list)

    @property
    def old(self) -> list[str]:
        """The lines that have to be there."""
        return [line[1:] for line in self.lines if line[:1] != "+"]


def parse_patch(patch: str) -> dict[str, list[Hunk]]:
    """Return the hunks of each file that a unified diff names.

    Raises:
        PatchError: the text is no unified diff, or it makes or removes a file.
    """
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] = []  # of the file that was named last
    lines = [line.removesuffix("\r") for line in patch.split("\n")]
    hunk: Hunk | None = None
    for place, line in enumerate(lines):
        names = [line, *lines[place + 1 : place + 2]]
        if line.startswith("--- ") and names[-1].startswith("+++ ") and lines[place + 2 : place + 3] != []:
            old, new = (name[4:].partition("\t")[0].strip() for name in names)
            if "/dev/null" in (old, new):
                raise PatchError(f"it makes or removes {old if new == '/dev/null' else new}. Next: edit what is there")
            hunk, hunks = None, files.setdefault(old, [])
        elif (begins := re.match(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@", line)) and files:
            hunk = Hunk(int(begins[1]))
            hunks.append(hunk)
        elif hunk is not None and (line[:1] in ("+", "-", " ") or not line):
            hunk.lines.append(line or " ")
        elif not line.startswith("\\"):  # "\ No newline at end of file"
            hunk = None
    for hunks in files.values():
        for hunk in hunks:  # an empty line behind the last one is the end of the file, or of a mail
            while hunk.lines and hunk.lines[-1] == " ":
                hunk.lines.pop()
    if not any(files.values()):
        raise PatchError("it is no unified diff. Next: what `git diff` or `diff -u` prints")
    return files


def apply_patch(
    patch: str, read: Callable[[str], str], folders: Sequence[pathlib.Path], line: str, editable: Callable[[str], bool]
) -> Change:
    """Return what a run does otherwise with a patch.

    Args:
        patch: a unified diff. Its file `command line` is the script's options.
        read: returns the text of a file.
        folders: in which its files are looked for, with and without the `a/` of git.
        line: the script's command line.
        editable: whether a run can read another text in the place of a file.

    Raises:
        PatchError: it does not apply.
    """
    change = Change()
    for name, hunks in parse_patch(patch).items():
        if name == COMMAND_LINE:
            change.files[name] = _edited(line + "\n", hunks, name).rstrip("\n")
            continue
        names = (name, name.partition("/")[2]) if name[:2] in ("a/", "b/") else (name,)
        paths = (os.path.realpath(folder / each) for folder in folders for each in names)
        path = next(filter(os.path.isfile, paths), None)
        if path is None:
            raise PatchError(f"{name} is not there. Next: paths from this folder, or from the script's")
        if not editable(path):
            own = "the script, modules of its own, and YAML files in its options"
            raise PatchError(f"{name} cannot be edited for a run: only {own} can")
        change.files[path] = _edited(read(path), hunks, name)
    return change


def _edited(text: str, hunks: Sequence[Hunk], name: str) -> str:
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    newline = "\r\n" if text.count("\r\n") else "\n"
    moved = 0  # lines that earlier hunks added
    for hunk in hunks:
        old, stripped = hunk.old, [line.rstrip("\r\n") for line in lines]
        wanted = max(0, hunk.line - 1 + moved) if old else hunk.line + moved
        places = [place for place in range(len(lines) + 1) if stripped[place : place + len(old)] == old]
        if wanted not in places and len(places) != 1:
            missing = next((line for line in old if line not in stripped), old[0] if old else "")
            why = f"they stand there {len(places)} times" if places else f"'{missing.strip()}' is not where it has it"
            raise PatchError(f"{name}: the lines of @@ -{hunk.line} @@ are not found: {why}. Next: make it anew")
        place = wanted if wanted in places else places[0]
        kept = iter(lines[place : place + len(old)])
        new = [line[1:] + newline if line[0] == "+" else next(kept) for line in hunk.lines]
        marks = [line[0] for line in hunk.lines]
        new = [line for line, mark in zip(new, marks) if mark != "-"]
        if place and lines and not lines[place - 1].endswith("\n"):
            lines[place - 1] += newline
        lines[place : place + len(old)] = new
        moved += len(new) - len(old)
    if (result := "".join(lines)) == text:
        raise PatchError(f"{name} is the same with it. Next: a diff that changes a line")
    return result
