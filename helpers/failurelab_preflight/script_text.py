"""The text of a script, and places in it: a call that ran is found in the text by the line and column of its frame.

Edits are made in the text as it was written, so that line ends, comments and layout stay.
"""

import ast
import dataclasses
import difflib
import inspect
import io
import itertools
import os
import pathlib
import re
import sys
import tokenize
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from failurelab_preflight import notebook
from failurelab_preflight.finding import Location


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a call stands: its file, lines from 1, and columns in bytes of UTF-8, as `ast` has them."""

    file: str
    line: int
    end_line: int
    column: int
    end_column: int


@dataclasses.dataclass(frozen=True)
class Edit:
    """A piece of a file's text, from `start` to `end` in characters, and what stands there instead."""

    file: str
    start: int
    end: int
    text: str


def own_frames(holds: Callable[[str], bool]) -> Iterator[types.FrameType]:
    """Return the frames of the script's own code that are running now, the innermost first."""
    return (frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if holds(frame.f_code.co_filename))


def place_of(frame: types.FrameType) -> Place:
    """Return the place of the call that a frame is in."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:  # Python 3.10 knows no columns: then no call is found in the text
        return Place(frame.f_code.co_filename, frame.f_lineno, 0, 0, 0)
    line, end_line, column, end_column = list(positions())[frame.f_lasti // 2]
    return Place(frame.f_code.co_filename, line or frame.f_lineno, end_line or 0, column or 0, end_column or 0)


def find_called(frame: types.FrameType, call: ast.Call) -> Any:
    """Return what a call in a frame calls, where it is a name or an attribute of one; None elsewhere."""
    names, node = [], call.func
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    value = {**frame.f_globals, **frame.f_locals}.get(node.id)
    for name in reversed(names):
        value = inspect.getattr_static(value, name, None) if not inspect.ismodule(value) else getattr(value, name, None)
    return value


def read_source(path: str | os.PathLike) -> str:
    """Return the text of a Python file, by the encoding that it declares, with its own line ends and no BOM.

    Of a notebook, its code cells.

    Raises:
        SyntaxError: the encoding it declares is none, or it is no notebook.
        UnicodeDecodeError: it is not in that encoding.
    """
    data = pathlib.Path(path).read_bytes()
    if os.fspath(path).endswith(".ipynb"):
        return notebook.as_script(data.decode())[0]
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding)


def encode_source(path: str | os.PathLike, text: str) -> bytes:
    """Return a text in the encoding that a file declares, with its BOM if it has one."""
    with open(path, "rb") as file:
        return text.encode(tokenize.detect_encoding(file.readline)[0])


class Text:
    """One file's text, with its own line ends, and its syntax tree; `file` is its path, as frames name it.

    Raises:
        SyntaxError: it is no Python.
    """

    def __init__(self, file: str, text: str):
        self.file, self.text = file, text
        self.tree = ast.parse(text)
        self._lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", text)
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]
        self.newline = "\r\n" if "\r\n" in text else "\n"

    def offset(self, line: int, column: int) -> int:
        """Return the place in the text of a line and a column in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: Any) -> tuple[int, int]:
        """Return where a node begins and ends."""
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def call(self, place: Place) -> ast.Call | None:
        """Return the call that stands at a place.

        If a method's name stands in a later line than its object, a frame gives the place of the name.
        """
        end = (place.end_line, place.end_column)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and (node.end_lineno, node.end_col_offset) == end:
                begins = [(node.lineno, node.col_offset)]
                if isinstance(node.func, ast.Attribute) and node.func.end_lineno != node.lineno:
                    last = (node.func.end_col_offset or 0) - len(node.func.attr.encode())
                    begins.append((node.func.end_lineno or 0, last))
                if (place.line, place.column) in begins:
                    return node
        return None

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that a node is in."""
        around = [
            statement
            for statement in ast.walk(self.tree)
            if isinstance(statement, ast.stmt) and node in ast.walk(statement)
        ]
        return around[-1]  # ast.walk comes to what is inside later

    def before(self, statement: ast.stmt, *lines: str) -> Edit:
        """Return the edit that puts statements of one line each in front of another one."""
        start = self.offset(statement.lineno, statement.col_offset)
        if decorators := getattr(statement, "decorator_list", None):
            start = self.offset(decorators[0].lineno, statement.col_offset)
        indent = self.text[self._starts[statement.lineno - 1] : start]
        after = "; " if indent.strip() else self.newline + indent
        return Edit(self.file, start, start, "".join(line + after for line in lines))

    def set_keywords(self, call: ast.Call, values: Mapping[str, str]) -> list[Edit]:
        """Return the edits that give keyword arguments of a call other values; a name that is not there is added."""
        edits, missing = [], dict(values)
        for keyword in call.keywords:
            if keyword.arg in missing:
                edits.append(Edit(self.file, *self.span(keyword.value), missing.pop(keyword.arg)))
        unpacked = [keyword for keyword in call.keywords if keyword.arg is None]
        if missing and unpacked:
            value = unpacked[-1].value
            start, end = self.span(value)
            pairs = ", ".join(f'"{name}": {source}' for name, source in missing.items())
            edits.append(Edit(self.file, start, end, f"{{**{self.text[start:end]}, {pairs}}}"))
        elif missing:
            edits.append(self._added(call, ", ".join(f"{name}={source}" for name, source in missing.items())))
        return edits

    def without_keyword(self, call: ast.Call, keyword: ast.keyword) -> list[Edit]:
        """Return the edit that takes a keyword argument out of a call."""
        start, end = self.span(keyword)
        tokens = self._tokens(call)
        after = next(token for token in tokens if token[1] >= end and token[0] in ",)")
        line_start, line_end = self._starts[keyword.lineno - 1], self._starts[keyword.end_lineno or keyword.lineno]
        rest = self.text[after[2] : line_end] if after[0] == "," else ""
        if after[0] == "," and not self.text[line_start:start].strip() and not rest.partition("#")[0].strip():
            return [Edit(self.file, line_start, line_end, "")]
        if after[0] == ",":
            end = after[2] + len(rest) - len(rest.lstrip(" "))
        else:
            before = [token for token in tokens if token[2] <= start]
            start = before[-1][1] if before and before[-1][0] == "," else start
        return [Edit(self.file, start, end, "")]

    def _added(self, call: ast.Call, text: str) -> Edit:
        """Return the edit that adds arguments at the end of a call."""
        last, _, end = self._tokens(call)[-2]  # before the closing parenthesis
        return Edit(self.file, end, end, f"{'' if last == '(' else ' ' if last == ',' else ', '}{text}")

    def _tokens(self, call: ast.Call) -> list[tuple[str, int, int]]:
        """Return the tokens of a call, without comments and line ends: each its text, its start and its end."""
        start, end = self.span(call)
        kept = []
        part = self.text[start:end]
        starts = [0, *(match.end() for match in re.finditer(r"\r\n|\n|\r", part))]
        for token in tokenize.generate_tokens(io.StringIO(part, newline="").readline):
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER) and token.string:
                first, last = (start + starts[row - 1] + column for row, column in (token.start, token.end))
                kept.append((token.string, first, last))
        return kept


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is a text that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def locate(file: str, text: str, offset: int, original: str) -> Location:
    """Return the line of a place in a text, as the file has it that the text was made of.

    Args:
        file: its path.
        text: with the edits of rounds before.
        offset: in characters.
        original: what the file holds; of a notebook, the text of its code cells.
    """
    here = text.count("\n", 0, offset)  # lines from 0
    lines, before = text.splitlines(), original.splitlines()
    blocks = difflib.SequenceMatcher(None, before, lines, autojunk=False).get_matching_blocks()
    line = next((a + max(0, here - b) for a, b, size in blocks if here < b + size), len(before))
    return location(file, line + 1, original)


def location(file: str, line: int, text: str) -> Location:
    """Return where a line of a file's text stands; of a notebook, whose text is that of its cells, in which cell."""
    marks = [
        place for place, text_line in enumerate(text.splitlines()[: line - 1]) if re.fullmatch(r"# cell \d+", text_line)
    ]
    if file.endswith(".ipynb") and marks:
        return Location(file, line - 1 - marks[-1], int(text.splitlines()[marks[-1]].split()[-1]))
    return Location(file, line)


def apply_edits(files: Mapping[str, str], edits: Sequence[Edit]) -> dict[str, str]:
    """Return the texts of the files with the edits made; each of them speaks of the text before."""
    changed = dict(files)
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        text = changed[edit.file]
        changed[edit.file] = text[: edit.start] + edit.text + text[edit.end :]
    return changed


def make_patch(
    before: Mapping[str, bytes], after: Mapping[str, bytes], names: Mapping[str, str], context: int = 3
) -> bytes:
    """Return a patch that `git apply` takes, of the contents of files by path; `names` is what it calls the paths."""
    lines: list[bytes] = []
    for path in sorted(after):
        old, new = (re.findall(rb"[^\n]*\n|[^\n]+", contents) for contents in (before[path], after[path]))
        name = names[path].encode()
        changes = difflib.diff_bytes(difflib.unified_diff, old, new, b"a/" + name, b"b/" + name, n=context)
        for line in changes:
            lines.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(lines)
