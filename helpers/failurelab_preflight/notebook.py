"""A notebook as a script: its code cells one after another, and what only IPython can run left out.

`train.ipynb` holds what `train.py` does, and lines beside it that are no Python: `%pip install`, `!nvidia-smi`,
`%%writefile`. Such a line becomes a comment, and is told. What is only timed or captured is run as it is, and a
variable of the environment that `%env` sets is set.

As for IPython, such a line begins where a statement could: a line of an expression or of a text that goes on is Python,
whatever it begins with. IPython itself is not asked, for the Python that trains and the one that makes the patch must
read the same text, and not both may have it.
"""

import json
import re
import tokenize

# Magics whose body is Python that runs here; of any other cell magic the whole cell is left out.
_RUNS_HERE = ("time", "timeit", "capture", "prun")
_SHOWN = "try:\n    from IPython.display import display\nexcept ImportError:\n    display = print\n"
_MAGIC = re.compile(
    r"(?P<indent>\s*)(?:(?P<name>[^=#'\"]+?)\s*=\s*)?[%!]{1,2}\s*\S|\s*\?{1,2}[\w.]+\s*$|\s*[\w.]+\?{1,2}\s*$"
)
_TIMED = re.compile(r"(?P<indent>\s*)%time\s+(?P<statement>[^-\s].*)")
_SETS = re.compile(r"(?P<indent>\s*)%(?:set_)?env\s+(?P<name>\w+)(?:\s*=\s*|\s+)(?P<value>[^{$]*)$")


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
    code = (place for place, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#"))
    first = next(code, 0)  # a title may stand above a cell's magic
    cell_magic = re.match(r"%%(\w+)", lines[first]) if lines else None
    if cell_magic:
        if cell_magic[1] not in _RUNS_HERE:
            return [f"# {line}" for line in lines], [lines[first].strip()]
        lines = [*lines[:first], f"# {lines[first]}", *lines[first + 1 :]]
    kept: list[str] = []
    left_out: list[str] = []
    while len(kept) < len(lines):
        rest = lines[len(kept) :]
        new = _stand_in(rest[0])
        if new == rest[0]:
            kept += rest[: _count_lines(rest)]
            continue
        if new.endswith(f"# {rest[0].strip()}"):
            left_out.append(rest[0].strip())
        ends = (place for place, line in enumerate(rest) if not line.endswith("\\"))
        kept += [new, *(f"# {line}" for line in rest[1 : next(ends, len(rest)) + 1])]  # of a command that goes on
    return kept, left_out


def _count_lines(lines: list[str]) -> int:
    """Return how many lines the statement has that begins in the first: a bracket or a text may stay open."""
    if not lines[0].strip() or lines[0].lstrip().startswith("#"):
        return 1
    try:
        for token in tokenize.generate_tokens((f"{line}\n" for line in lines).__next__):
            if token.type == tokenize.NEWLINE:
                return token.start[0]
    except (tokenize.TokenError, SyntaxError) as error:  # it has no end, or is no Python
        return len(lines) if re.search("EOF in multi-line|triple-quoted", str(error)) else 1
    return 1


def _stand_in(line: str) -> str:
    """Return a line of Python for one of IPython: nothing is run, and a name that it sets is an empty list.

    A statement that is timed is run, and a variable of the environment is set.
    """
    if timed := _TIMED.match(line):
        return timed["indent"] + timed["statement"]
    if sets := _SETS.match(line):
        return f"{sets['indent']}__import__('os').environ[{sets['name']!r}] = {sets['value'].strip()!r}"
    match = _MAGIC.match(line)
    if match is None:
        return line
    name = match["name"]
    return f"{match['indent'] or ''}{f'{name.strip()} = []' if name else 'pass'}  # {line.strip()}"
