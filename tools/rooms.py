"""Draw the rooms of the code into docs/architecture.md, from the contracts of imports in pyproject.toml: make rooms.

It looks at the house too: no class name stands twice, and each file and name that the page speaks of is there. With
--check it writes nothing, and ends with status 1 where the picture is stale; where the house is not so, always.
"""

import ast
import collections
import pathlib
import re
import sys
import textwrap

import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
HELPERS = ROOT / "helpers"
PACKAGES = ("failurelab", "failurelab_preflight", "failurelab_course")
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- end rooms -->"
WIDTH = 16
_FILE = re.compile(r"[\w*./-]+(/|\.(py|toml|json|md|txt|in))")
_NAME = re.compile(r"[A-Za-z_][\w.]*")


def describe(package: str, room: str) -> str:
    """Return the first sentence of a room's or module's docstring."""
    path = HELPERS / package / room
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].rstrip(".")


def list_rooms(package: str) -> list[str]:
    """Return the public rooms and modules of a package."""
    paths = (HELPERS / package).iterdir()
    names = (path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").is_file())
    return sorted(name for name in names if not name.startswith("_"))


def draw() -> str:
    """Return the picture: the course's rooms from the door down, then what a user takes home."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers"))
    lines = ["failurelab_course: each line imports only lines below it"]
    for layer in layers:
        for number, room in enumerate(layer.split(" | ")):
            lines.append(f"  {'beside ' * bool(number)}{room}".ljust(WIDTH + 8) + describe("failurelab_course", room))
    for package, heading in (
        ("failurelab_preflight", "imports failurelab, and nothing of the course"),
        ("failurelab", "imports nothing of the others; what users call stands in docs/repairs.md"),
    ):
        rooms = ", ".join(list_rooms(package))
        lines += ["", f"{package}: {heading}", *textwrap.wrap(rooms, 116, initial_indent="  ", subsequent_indent="  ")]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def find_names() -> tuple[dict[str, list[str]], set[str]]:
    """Return the classes of both packages, by name with where each stands, and all names that are defined there."""
    classes, names = collections.defaultdict(list), set(PACKAGES)
    for path in sorted(path for package in PACKAGES for path in (HELPERS / package).rglob("*.py")):
        names |= set(path.relative_to(HELPERS).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return classes, names


def find_faults(page: str) -> list[str]:
    """Return what is not as it should be: a line for each class name that stands twice, and for each word of the page.

    A word of the page is looked for where it stands in backticks, as a file (below the root, or below helpers/), or as
    a name; commands, which have blanks, are not.
    """
    classes, names = find_names()
    faults = [f"{name} is {len(places)} classes: {', '.join(places)}" for name, places in classes.items() if places[1:]]
    for word in dict.fromkeys(re.findall(r"`([^`\n]+)`", page)):
        if _FILE.fullmatch(word):
            if not any(any(folder.glob(word.rstrip("/"))) for folder in (ROOT, HELPERS)):
                faults.append(f"{PAGE.relative_to(ROOT)} speaks of {word}, which is no file here")
        elif _NAME.fullmatch(word) and not names.issuperset(word.split(".")):
            faults.append(f"{PAGE.relative_to(ROOT)} speaks of {word}, which is no name in the code")
    return faults


def main() -> int:
    """Write the picture, or look whether it is stale; say what else is wrong."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    drawn = before + BEGIN + draw() + END + rest.partition(END)[2]
    faults = find_faults(before + rest.partition(END)[2])
    if drawn != text and "--check" in sys.argv:
        faults.append("docs/architecture.md is stale. Next: make rooms")
    elif drawn != text:
        PAGE.write_text(drawn, encoding="utf-8")
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
