"""Cells run out of order: a NameError in a notebook names the cell that makes the name.

Who opens a notebook in the middle, or jumps, meets `name 'trainer' is not defined`. Which cell to run first is written
in the notebook's file, whose path Jupyter gives to the kernel.
"""

import ast
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from failurelab_course.notebook.kernel_output import EraCellError

_PATH = "JPY_SESSION_NAME"  # Jupyter Server sets it: the path of the notebook's file


def install(shell: Any) -> None:
    """Let a NameError in this shell, or in an era's cell, end in a line that says which cell to run first."""
    shell.set_custom_exc((NameError, EraCellError), _explain)


def _explain(shell: Any, kind: type, error: BaseException, traceback: Any, tb_offset: int | None = None) -> None:
    """Show the traceback that the reader would see anyway, and the advice below it."""
    if isinstance(error, EraCellError):
        lines = error._render_traceback_()
        missing = re.match(r"name '(\w+)' is not defined", error.evalue) if error.ename == "NameError" else None
        name, kernel = missing[1] if missing else None, error.era
    else:
        lines = shell.InteractiveTB.structured_traceback(kind, error, traceback, tb_offset=tb_offset)
        name, kernel = getattr(error, "name", None), ""
    advice = _advice(name, kernel, shell.user_ns.get("In", [""])[-1]) if name else ""
    shell._showtraceback(kind, error, [*lines, advice] if advice else lines)  # IPython leaves it to a handler


def _advice(name: str, kernel: str, failed: str) -> str:
    """Return which cell of the notebook makes this name in this kernel; empty if none does, or it has no file here."""
    try:
        cells = json.loads(pathlib.Path(os.environ[_PATH]).read_text(encoding="utf-8"))["cells"]
    except (KeyError, OSError, ValueError):
        return ""
    sources = ["".join(cell["source"]) if cell["cell_type"] == "code" else None for cell in cells]
    code = [number for number, source in enumerate(sources) if source is not None]
    here = next((number for number in code if sources[number].strip() == failed.strip()), len(cells))
    made = [n for n in code if n < here and name in made_names(sources[n], kernel)]
    if not made:
        return ""
    heading = next(
        (line.lstrip("# ") for cell in reversed(cells[: made[-1]]) if cell["cell_type"] == "markdown"
         for line in reversed("".join(cell["source"]).splitlines()) if line.startswith("#")),
        "the top",
    )  # fmt: skip
    first = next(line for line in sources[made[-1]].splitlines() if line.strip() and not line.startswith("%%"))
    return (
        f"Cells were run out of order: {name!r} is made by code cell {code.index(made[-1]) + 1}, under “{heading}”, "
        f"which begins with `{first}`. Next: run that cell first, or Run > Run All Above Selected Cell."
    )


def made_names(source: str, kernel: str) -> set[str]:
    """Return the names that a cell makes in a kernel: an era's name, or empty for the notebook's own."""
    head, _, body = source.partition("\n") if source.startswith("%%era ") else ("", "", source)
    words = head.split()
    if words and kernel not in words[1].split(","):
        return set(_carried(words, "-o")) if not kernel else set()
    if not words and kernel:
        return set()
    try:
        python = "\n".join(line for line in body.splitlines() if not line.lstrip().startswith("%"))
        nodes = list(ast.walk(ast.parse(python)))
    except SyntaxError:
        return set()
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names | set(_carried(words, "-i"))


def _carried(words: Sequence[str], option: str) -> Iterator[str]:
    for word, after in itertools.pairwise(words):
        if word == option:
            yield from after.split(",")
