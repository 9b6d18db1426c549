"""A notebook as a script: its code cells one after another, and what only IPython can run left out.

`train.ipynb` holds what `train.py` does, and lines beside it that are no Python: `%pip install`, `!nvidia-smi`,
`%%writefile`. Such a line becomes a comment, and is told. A cell that is only timed or captured is run as it is.
"""

import ast
import json
import re

# Cell magics whose body is Python that runs here; of any other one the whole cell is left out.
_RUNS_HERE = ("time", "timeit", "capture", "prun")
_SHOWN = "try:\n    from IPython.display import display\nexcept ImportError:\n    display = print\n"
_MAGIC = re.compile(
    r"(?P<indent>\s*)(?:(?P<name>[^=#'\"]+?)\s*=\s*)?[%!]{1,2}\s*\S|\s*\?{1,2}[\w.]+\s*$|\s*[\w.]+\?{1,2}\s*$"
)


def as_script(text: str) -> tuple[str, list[str]]:
    """Return a notebook's code cells as the text of a script, and the lines that were left out.

    Raises:
        SyntaxError: it is no notebook.
    """
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise SyntaxError(f"it is no notebook with cells ({type(error).__name__}: {error})") from error
    parts, left_out = [_SHOWN], []
    for number, source in enumerate(sources, 1):
        lines, magics = _without_magics(source.splitlines())
        parts.append("\n".join([f"# cell {number}", *lines, ""]))
        left_out += [f"cell {number}: {line}" for line in magics]
    return "".join(parts), left_out


def _without_magics(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the lines of a cell with Python alone, and the lines that were taken out."""
    first = next((place for place, line in enumerate(lines) if line.strip()), 0)
    cell_magic = re.match(r"%%(\w+)", lines[first]) if lines else None
    if cell_magic:
        if cell_magic[1] not in _RUNS_HERE:
            return [f"# {line}" for line in lines], [lines[first].strip()]
        lines = [*lines[:first], f"# {lines[first]}", *lines[first + 1 :]]
    if _is_python(lines):  # a line may begin with % inside of an expression or a text
        return lines, []
    kept = [_stand_in(line) for line in lines]
    return kept, [line.strip() for line, new in zip(lines, kept) if line != new]


def _is_python(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):
        return False
    return True


def _stand_in(line: str) -> str:
    """Return a line of Python for one of IPython: nothing is run, and a name that it sets is an empty list."""
    match = _MAGIC.match(line)
    if match is None:
        return line
    name = match["name"]
    return f"{match['indent'] or ''}{f'{name.strip()} = []' if name else 'pass'}  # {line.strip()}"
