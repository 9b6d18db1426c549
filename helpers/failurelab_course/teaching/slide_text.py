"""What of a notebook stands on a slide: prose, code, outputs and tables cut to what can be read from the back row.

A notebook is read at a desk, a slide from ten metres. So a paragraph is cut to its first sentences and to those with
bold words, code to what calls something, and a long output or table is cut or goes on, on the next slide. What is left
out is never silent: prose ends in an ellipsis and goes whole into the speaker notes, code and outputs say how many
lines are missing.

Heights are in pixels of a page of 1280 x 720, and are estimates on the safe side: `make slides-test` measures the pages
in a browser.
"""

import ast
import math
import re
import textwrap

WIDE, HIGH = 1280, 720
ROOM = 560  # below the heading
LINE_ABOVE = 100  # what a picture that shares its slide leaves for the words above it
PROSE_LINE, PROSE_CHARS = 43, 62
CODE_LINE, CODE_LINES = 31, 12
TEXT_LINE, TEXT_CHARS, TEXT_LINES = 31, 79, 14
ROW, ROW_LINE, ROW_CHARS = 47, 34, 66
_ENOUGH = 110  # characters of a paragraph that are shown before it is cut
_ENDS = re.compile(r"(?:(?<=[.!?])|(?<=[.!?]\*\*)|(?<=[.!?]\)))\s+(?=[A-Z*\"`\[(])")
_LEFT = "# ... {} more lines in the notebook"


def blocks(markdown: str) -> list[tuple[str, str]]:
    """Split a markdown cell into its blocks: `(kind, text)`.

    The kinds are heading, table, list, quote, fence, details and prose.
    """
    found: list[tuple[str, str]] = []
    for chunk in re.split(r"(<details>.*?</details>|^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE):
        if chunk.startswith("<details>"):
            found.append(("details", chunk))
        elif chunk.startswith("```"):
            found.append(("fence", chunk))
        else:
            for piece in re.split(r"\n\s*\n", chunk):
                for part in re.split(r"(^#+ .*$)", piece.strip("\n"), flags=re.MULTILINE):
                    if part.strip():
                        found.append((_kind(part.strip("\n")), part.strip("\n")))
    return found


def _kind(text: str) -> str:
    marks = {r"#+ ": "heading", r"\|": "table", r"([-*]|\d+\.) ": "list", r">": "quote"}
    return next((kind for mark, kind in marks.items() if re.match(mark, text)), "prose")


def items(text: str) -> list[str]:
    """Return the items of a markdown list, each with its mark, on one line."""
    parts = re.split(r"^(?=(?:[-*]|\d+\.) )", text, flags=re.MULTILINE)
    return [" ".join(part.split()) for part in parts if part.strip()]


def sentences(text: str) -> list[str]:
    """Split prose into sentences; what is bold, code or in parentheses stays in one piece."""
    found: list[str] = []
    for piece in _ENDS.split(" ".join(text.split())):
        if found and not _closed(found[-1]):
            found[-1] += f" {piece}"
        else:
            found.append(piece)
    return found


def _closed(text: str) -> bool:
    bare = re.sub(r"`[^`]*`", "", text)
    return bare.count("**") % 2 == 0 and "`" not in bare and bare.count("(") <= bare.count(")")


def cut(text: str) -> str:
    """Return a paragraph's first sentences, and those later on with bold words; an ellipsis stands for the rest."""
    kept, length, cut_off = [], 0, False
    for sentence in sentences(text):
        if length < _ENOUGH or "**" in sentence:
            kept.append(("... " if cut_off else "") + sentence)
            length += len(sentence)
            cut_off = False
        else:
            cut_off = True
    return " ".join(kept) + (" ..." if cut_off else "")


def unlinked(text: str) -> str:
    """Return markdown without links into the repository, which lead nowhere from a deck; others stay."""
    return re.sub(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)*)\]\((?!https?:)[^()\s]*\)", r"\1", text)


def prose_height(text: str) -> int:
    """Return the height of a paragraph or of an item, markup not counted."""
    bare = re.sub(r"\]\([^)]*\)|[*`\[]", "", text)
    return math.ceil(len(bare) / PROSE_CHARS) * PROSE_LINE + 14


class Code:
    """A code cell, cut to what matters.

    Attributes:
        text: the lines to be shown; empty if none matters.
        defines: the names of functions and classes that the cell defines.
        calls: whether anything but definitions, constants and imports is in it.
        lays_out: whether all it does is to print figures that it puts into words.
    """

    def __init__(self, source: str):
        lines = [line for line in source.splitlines() if line.strip() != "# NBVAL_CHECK_OUTPUT"]
        magic = [line for line in lines if line.startswith("%%")][:1]
        body = "\n".join(line for line in lines if not line.startswith("%%")).strip("\n")
        # Which values travel to an era and back is of no interest from the back row.
        head = [" ".join(magic[0].split()[:2])] if magic else []
        try:
            tree = ast.parse(body)
        except SyntaxError:  # a line magic, say: shown as it is
            self.defines, self.calls, self.lays_out = [], True, False
            self.text = _limited([*head, *body.splitlines()])
            return
        told = [each for each in tree.body if not _is_import(each) and not _is_record(each)]
        self.defines = [each.name for each in told if _is_definition(each)]
        self.calls = any(not _is_definition(each) and not _is_constant(each) for each in told)
        self.lays_out = bool(told) and all(_is_print(each) for each in told) and _formats(told)
        whole = [line for each in told for line in _lines(body, each)]
        folded = [line for each in told for line in _lines(body, each, fold=True)]
        chosen = whole if len(head) + len(whole) <= CODE_LINES else folded
        self.text = _limited([*head, *chosen]) if told else ""


def _limited(lines: list[str]) -> str:
    if len(lines) <= CODE_LINES:
        return "\n".join(lines)
    kept = lines[: CODE_LINES - 1]
    return "\n".join([*kept, _LEFT.format(len(lines) - len(kept))])


def _lines(body: str, node: ast.stmt, fold: bool = False) -> list[str]:
    lines = body.splitlines()
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]) - 1
    if fold and _is_definition(node) and node.end_lineno - first > 3:
        return [*lines[first : node.body[0].lineno - 1], "    ..."]
    return lines[first : node.end_lineno]


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_definition(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _is_constant(node: ast.stmt) -> bool:
    """Whether a statement only gives a name to something that is written out: no call, no loop."""
    return isinstance(node, ast.Assign) and not any(
        isinstance(each, ast.Call | ast.comprehension) for each in ast.walk(node.value)
    )


def _is_record(node: ast.stmt) -> bool:
    """Whether a statement keeps evidence and does nothing else."""
    if isinstance(node, ast.For):
        return all(_is_record(each) or _is_constant(each) for each in node.body)
    value = getattr(node, "value", None)
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "observe.record"


def _is_print(node: ast.stmt) -> bool:
    if isinstance(node, ast.For):
        return all(_is_print(each) or isinstance(each, ast.Assign) for each in node.body)
    value = getattr(node, "value", None)
    if isinstance(node, ast.Assign):  # a figure that is put into words
        return not isinstance(value, ast.Call)
    return isinstance(node, ast.Expr) and isinstance(value, ast.Call) and ast.unparse(value.func) == "print"


def _formats(told: list[ast.stmt]) -> bool:
    return any(isinstance(each, ast.JoinedStr | ast.For | ast.IfExp) for node in told for each in ast.walk(node))


def wrapped(text: str) -> list[str]:
    """Return an output's lines as a slide breaks them, cut to what fits, with a line that says how many are missing."""
    lines = []
    for line in text.rstrip("\n").splitlines():
        lines += textwrap.wrap(line, TEXT_CHARS, subsequent_indent="  ", replace_whitespace=False) or [""]
    if len(lines) <= TEXT_LINES:
        return lines
    kept = lines[: TEXT_LINES - 1]
    return [*kept, f"... {len(lines) - len(kept)} more lines in the notebook"]


def row_height(cells: list[str], wide: int) -> int:
    """Return the height of a table's row.

    Args:
        cells: its texts.
        wide: the characters of the table's widest columns together; a table that is not too wide breaks no row.
    """
    if wide <= ROW_CHARS:
        return ROW
    return ROW + (math.ceil(1.3 * sum(map(len, cells)) / ROW_CHARS) - 1) * ROW_LINE


def width(rows: list[list[str]]) -> int:
    """Return the characters of a table's widest columns together, with the space between them."""
    return sum(max(len(row[place]) for row in rows if place < len(row)) + 2 for place in range(len(rows[0])))


def crowded(rows: list[list[str]]) -> bool:
    """Whether a table is too wide even with every word on a line of its own; then its letters are made smaller."""
    words = [
        [max(map(len, row[place].split()), default=0) for row in rows if place < len(row)]
        for place in range(len(rows[0]))
    ]
    return sum(max(column) + 2 for column in words) > ROW_CHARS


def split_rows(heights: list[int], room: int) -> list[tuple[int, int]]:
    """Return the first and last (exclusive) row for each slide that a table takes, a heading on each counted."""
    found, start, used = [], 0, ROW
    for place, height in enumerate(heights):
        if used + height > room and place > start:
            found.append((start, place))
            start, used = place, ROW
        used += height
    return [*found, (start, len(heights))]
