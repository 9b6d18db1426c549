"""How large the house is: lines and tokens of Python by room, notebooks, pages, files.

    python tools/size.py              what HEAD holds, beside the goals
    python tools/size.py REV          what a commit holds
    python tools/size.py OLD NEW      both, and what became of it in per cent

Only tracked files count, as `git archive` gives them: nothing is checked out. A line is a line of the file, empty ones
too. A token is one of Python's own `tokenize`, without comments and line ends, so that packed lines save nothing.
Python inside strings (more than 3 lines that parse) and TOML stand in columns of their own.
"""

import argparse
import ast
import collections
import io
import json
import subprocess
import tarfile
import textwrap
import tokenize
import warnings

# The most lines of Python that a room should have, and files in the tree.
GOALS = {"failurelab": 16_800, "failurelab_course": 8_500, "tools": 2_100, "tests": 16_000, "benchmarks": 4_500}
GOAL_FILES = 800
COLUMNS = ("lines", "tokens", "in strings", "toml")
_UNCOUNTED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def read_files(revision: str) -> dict[str, bytes]:
    """Return what each file of a commit holds, by its path."""
    archive = subprocess.run(["git", "archive", revision], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}


def find_room(path: str) -> tuple[str, str]:
    """Return the room that a file counts for, and the part of it; empty where a room has no parts."""
    first, *rest = path.removeprefix("helpers/").split("/")
    if not rest:
        return "(top)", ""
    if first == "benchmarks":
        return ("benchmarks" if len(rest) == 1 else "corpora of benchmarks"), ""
    if first not in GOALS or first == "tools":
        return first, ""
    return first, f"  {first}/{rest[0] if len(rest) > 1 else '(top)'}"


def count_tokens(source: bytes) -> int:
    """Return how many tokens Python's tokenizer finds, without comments, line ends and indents."""
    return sum(token.type not in _UNCOUNTED for token in tokenize.tokenize(io.BytesIO(source).readline))


def count_python_in_strings(source: bytes) -> int:
    """Return the lines of string constants, f-strings too, that are Python of more than 3 lines."""
    total, parts = 0, set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        lines = textwrap.dedent(text).strip().splitlines()
        if len(lines) > 3 and _is_python("\n".join(lines)):
            total += len(lines)
    return total


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def count_rooms(files: dict[str, bytes]) -> dict[str, collections.Counter]:
    """Return the columns of each room, in the order in which they are shown."""
    rooms: dict[str, dict[str, collections.Counter]] = {room: {} for room in GOALS}
    for path, content in sorted(files.items()):
        if path.endswith(".toml"):
            counts = {"toml": content.count(b"\n")}
        elif path.endswith(".py"):
            counts = {"lines": content.count(b"\n"), "tokens": count_tokens(content)}
            counts["in strings"] = count_python_in_strings(content)
        else:
            continue
        room, part = find_room(path)
        for name in filter(None, (room, part)):
            rooms.setdefault(room, {}).setdefault(name, collections.Counter()).update(counts)
    return {
        name: counts
        for room, parts in rooms.items()
        for name, counts in ({room: collections.Counter()} | parts).items()
    }


def count_pages(files: dict[str, bytes]) -> dict[str, int]:
    """Return the cells, lines and words of notebooks, the words of pages, and the number of files."""
    cells = [
        cell for path, content in files.items() if path.endswith(".ipynb") for cell in json.loads(content)["cells"]
    ]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    pages = {path: len(content.split()) for path, content in files.items() if path.endswith(".md")}
    return {
        "notebooks: cells": len(cells),
        "notebooks: cells of code": len(code),
        "notebooks: lines of code": sum(len(text.splitlines()) for text in code),
        "notebooks: words": sum(len(text.split()) for text in prose),
        "pages: words in docs/": sum(words for path, words in pages.items() if path.startswith("docs/")),
        "pages: words in README.md": pages.get("README.md", 0),
        "pages: words elsewhere": sum(n for path, n in pages.items() if not path.startswith(("docs/", "README.md"))),
        "files": len(files),
    }


def show(revisions: list[str]) -> None:
    """Print the tables of one commit or of two."""
    trees = [read_files(revision) for revision in revisions]
    rooms, pages = [count_rooms(tree) for tree in trees], [count_pages(tree) for tree in trees]
    width = 12 if len(revisions) == 1 else 24
    print(
        f"{'Python, ' + ' against '.join(revisions):<44}" + "".join(f"{head:>{width}}" for head in COLUMNS) + "   goal"
    )
    for room in dict.fromkeys(name for counts in rooms for name in counts):
        cells = [_cell([counts.get(room, {}).get(column, 0) for counts in rooms]) for column in COLUMNS]
        goal = f"{GOALS[room]:>7,}" if room in GOALS else ""
        print(f"{room:<44}" + "".join(f"{cell:>{width}}" for cell in cells) + goal)
    print()
    for what in pages[0]:
        goal = f"   goal {GOAL_FILES:,}" if what == "files" else ""
        print(f"{what:<44}{_cell([counts[what] for counts in pages]):>{width}}{goal}")


def _cell(numbers: list[int]) -> str:
    change = f" ({numbers[1] / numbers[0] - 1:+.0%})" if len(numbers) > 1 and numbers[0] else ""
    return " > ".join(f"{number:,}" for number in numbers) + change


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revisions", nargs="*", metavar="REV", help="one commit, or two; by default HEAD")
    arguments = parser.parse_args()
    if len(arguments.revisions) > 2:
        parser.error("one commit or two")
    warnings.simplefilter("ignore", SyntaxWarning)  # of strings that are no Python
    show(arguments.revisions or ["HEAD"])
