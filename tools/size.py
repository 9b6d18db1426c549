"""How large the house is: each room beside its ceiling (`tools/ceilings.toml`) and its goal.

    python tools/size.py              what HEAD holds
    python tools/size.py REV          what a commit holds
    python tools/size.py OLD NEW      both, and what became of it in per cent
    python tools/size.py --check      does the working tree keep the ceilings? (`make lint`)
    python tools/size.py --lower      write the working tree's numbers down where they are lower (`make ceilings`)

Only tracked files count, and of evidence nothing: it is what was measured. A line is a line of the file, empty ones
too. A token is one of Python's own `tokenize`, without comments and line ends, and an f-string is one, as in Python
3.11. Strings are the characters of all string constants. Words are those of Markdown and notebooks, and in TOML and
JSON what a regular expression calls one. An archive counts with the bytes of its files. So packing, moving and renaming
save nothing.
"""

import argparse
import ast
import collections
import io
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import tokenize
import warnings
from collections.abc import Iterator

import tomllib

# The most lines of Python that a room should have, words of docs, and files in the tree.
GOALS = {
    "failurelab": 6_500, "failurelab/textbook": 3_600, "failurelab_preflight": 8_900, "failurelab_course": 9_000,
    "tests": 16_000, "tools and benchmarks": 7_500, "docs": 24_000,
}  # fmt: skip
GOAL_FILES = 800
COLUMNS = ("lines", "tokens", "strings", "words", "archives")
HELD = COLUMNS[1:]
ALL = "in all"
CEILINGS = "tools/ceilings.toml"
_HEAD = """\
# The most tokens of Python, characters in strings, words of TOML, JSON and Markdown, and bytes of archives that each
# room may hold: `make lint`. A commit that deletes lowers them by `make ceilings`, and no commit raises them.
"""
_PREFLIGHT = ("failurelab/preflight/", "failurelab/rewards/", "failurelab/diagnose/", "failurelab_preflight/")
_UNCOUNTED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_BEGIN, _END = (getattr(tokenize, f"FSTRING_{name}", None) for name in ("START", "END"))  # since Python 3.12

Rooms = dict[str, dict[str, int]]


def read_files(revision: str) -> dict[str, bytes]:
    """Return what each file of a commit holds, by its path."""
    return unpack(subprocess.run(["git", "archive", revision], check=True, capture_output=True).stdout)


def read_tree() -> dict[str, bytes]:
    """Return what each tracked file holds now, by its path; of one that is gone nothing."""
    names = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True).stdout.decode().split("\0")
    return {name: pathlib.Path(name).read_bytes() for name in names if name and pathlib.Path(name).is_file()}


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the files of a tar archive, packed or not."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}


def find_room(path: str) -> tuple[str, str]:
    """Return the room that a file counts for, and the part of it; empty where a room has no parts."""
    path = path.removeprefix("helpers/")
    first, *rest = path.split("/")
    if not rest:
        return "(top)", ""
    if path.startswith(_PREFLIGHT):
        part = path.removeprefix("failurelab/").removeprefix("failurelab_preflight/").split("/")
        return "failurelab_preflight", f"  {part[0] if len(part) > 1 else 'failurelab_preflight'}"
    if path.startswith("failurelab/textbook/"):
        return "failurelab/textbook", ""
    if first in ("tools", "benchmarks"):
        return "tools and benchmarks", f"  {first}{': corpora' * (first == 'benchmarks' and len(rest) > 1)}"
    return first, f"  {first}/{rest[0]}" if first in GOALS and first != "docs" and len(rest) > 1 else ""


def count_file(path: str, content: bytes) -> dict[str, int]:
    """Return what a file counts in the columns that it has."""
    kind = path.rpartition(".")[2]
    if kind == "py":
        return {
            "lines": content.count(b"\n"),
            "tokens": count_tokens(content),
            "strings": sum(
                len(node.value)
                for node in ast.walk(ast.parse(content))
                if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
            ),
        }
    if kind == "md":
        return {"words": len(content.split())}
    if kind == "ipynb":
        return {"words": sum(len("".join(cell["source"]).split()) for cell in json.loads(content)["cells"])}
    if kind in ("toml", "json", "jsonl"):
        return {"words": len(re.findall(rb"\w+", content))}
    return {"archives": sum(map(len, unpack(content).values()))} if re.search(r"\.(tar(\.\w+)?|tgz)$", path) else {}


def count_tokens(source: bytes) -> int:
    """Return how many tokens Python's tokenizer finds, without comments, line ends and indents."""
    count, inside = 0, 0
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        inside -= token.type == _END
        count += not inside and token.type not in _UNCOUNTED and token.type != _END
        inside += token.type == _BEGIN
    return count


def count_rooms(files: dict[str, bytes]) -> tuple[Rooms, Rooms]:
    """Return the columns of each room, that of all last, and of each room's parts."""
    rooms: dict[str, collections.Counter] = {room: collections.Counter() for room in GOALS}
    parts: dict[str, collections.Counter] = {}
    total = collections.Counter()
    for path, content in sorted(files.items()):
        if path == CEILINGS or path.startswith("evidence/"):
            continue
        counts = count_file(path, content)
        room, part = find_room(path)
        rooms.setdefault(room, collections.Counter()).update(counts)
        parts.setdefault(part, collections.Counter()).update(counts)
        total.update(counts)
    parts.pop("", None)
    return {**rooms, ALL: total}, parts


def read_ceilings(files: dict[str, bytes]) -> Rooms:
    """Return the ceilings of a tree; none where it has no such file."""
    return tomllib.loads(files.get(CEILINGS, b"").decode())


def find_raised(rooms: Rooms, ceilings: Rooms) -> Iterator[str]:
    """Yield a line for each number above its ceiling: the room, what it holds, the ceiling, and how much it is now."""
    for room, counts in rooms.items():
        for column in HELD:
            now, ceiling = counts.get(column, 0), ceilings.get(room, {}).get(column, 0)
            if now > ceiling:
                yield f"{room}: {column}: ceiling {ceiling:,}, now {now:,}"


def lower(rooms: Rooms, ceilings: Rooms) -> Rooms:
    """Return the ceilings, each lowered to what is there now; where there were none yet, what is there now."""
    return {
        room: {
            column: min(counts.get(column, 0), ceilings[room].get(column, 0)) if ceilings else counts.get(column, 0)
            for column in HELD
        }
        for room, counts in rooms.items()
        if not ceilings or room in ceilings
    }


def as_toml(ceilings: Rooms) -> str:
    """Return the ceilings as their file holds them."""
    tables = (
        f'["{room}"]\n' + "".join(f"{column} = {number}\n" for column, number in numbers.items() if number)
        for room, numbers in ceilings.items()
        if any(numbers.values())
    )
    return "\n".join([_HEAD, *tables])


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
    """Print the tables of one commit, with its ceilings and the goals, or of two."""
    trees = [read_files(revision) for revision in revisions]
    counted, pages = [count_rooms(tree) for tree in trees], [count_pages(tree) for tree in trees]
    ceilings = read_ceilings(trees[0]) if len(trees) == 1 else {}
    width, heads = (24, COLUMNS) if len(trees) > 1 else (11, [each for name in COLUMNS for each in (name, "")])
    heads = ["goal" if place == 1 else head or "ceiling" for place, head in enumerate(heads)]
    print(f"{' against '.join(revisions):<28}" + "".join(f"{head:>{width}}" for head in heads))
    for kinds in zip(*counted):
        for room in dict.fromkeys(name for rooms in kinds for name in rooms):
            line = f"{room:<28}"
            for column in COLUMNS:
                line += f"{_cell([rooms.get(room, {}).get(column, 0) for rooms in kinds]):>{width}}"
                most = ceilings.get(room, {}).get(column) if column in HELD else GOALS.get(room)
                unit = " words" if room == "docs" and column == "lines" else ""
                limit = f"{most:,}{unit}" if most else ""
                line += f"{limit:>{width}}" if len(trees) == 1 else ""
            print(line.rstrip())
        print()
    for what in pages[0]:
        goal = f"   goal {GOAL_FILES:,}" if what == "files" else ""
        print(f"{what:<28}{_cell([counts[what] for counts in pages]):>{width}}{goal}")


def _cell(numbers: list[int]) -> str:
    change = f" ({numbers[1] / numbers[0] - 1:+.0%})" if len(numbers) > 1 and numbers[0] else ""
    return " > ".join(f"{number:,}" for number in numbers) + change


def main() -> int:
    """Show, check or lower; the exit status is 1 where a room is above its ceiling."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revisions", nargs="*", metavar="REV", help="one commit, or two; by default HEAD")
    parser.add_argument("--check", action="store_true", help="is the working tree within the ceilings?")
    parser.add_argument("--lower", action="store_true", help="write lower ceilings; without the file, all of them")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", SyntaxWarning)  # of strings that are no Python
    if not (arguments.check or arguments.lower):
        show(arguments.revisions or ["HEAD"])
        return 0
    (rooms, _), written = count_rooms(read_tree()), pathlib.Path(CEILINGS)
    ceilings = read_ceilings({CEILINGS: written.read_bytes()} if written.exists() else {})
    if arguments.lower:
        ceilings = lower(rooms, ceilings)
        written.write_text(as_toml(ceilings), encoding="utf-8")
    raised = list(find_raised(rooms, ceilings))
    for line in raised:
        print(f"ERROR {line}. Next: take out as much elsewhere in this room", file=sys.stderr)
    return int(bool(raised))


if __name__ == "__main__":
    sys.exit(main())
