"""Draw the rooms of the code into docs/architecture.md, from the contracts of imports in pyproject.toml: make rooms.

With --check it writes nothing and ends with status 1 if the picture is stale.
"""

import ast
import pathlib
import sys

import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- end rooms -->"
WIDTH = 16


def describe(package: str, room: str) -> str:
    """Return the first sentence of a room's or module's docstring."""
    path = ROOT / "helpers" / package / room
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].rstrip(".")


def draw() -> str:
    """Return the picture: the course's rooms from the door down, then what a user takes home."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    lines = ["failurelab_course: each line imports only lines below it"]
    for layer in layers:
        for number, room in enumerate(layer.split(" | ")):
            lines.append(f"  {'beside ' * bool(number)}{room}".ljust(WIDTH + 8) + describe("failurelab_course", room))
    lines += ["", "failurelab: imports nothing of the course"]
    take_home = ROOT / "helpers" / "failurelab"
    rooms = sorted(
        path.stem for path in take_home.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    )
    public = [room for room in rooms if not room.startswith("_")]
    lines += [f"  {room}".ljust(WIDTH + 8) + describe("failurelab", room) for room in public]
    lines.append(
        "  _*".ljust(WIDTH + 8)
        + "private: "
        + ", ".join(room for room in rooms if room.startswith("_") and room[1] != "_")
    )
    return "```text\n" + "\n".join(lines) + "\n```\n"


def main() -> int:
    """Write the picture, or look whether it is stale."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = before + BEGIN + draw() + END + after
    if text == PAGE.read_text(encoding="utf-8"):
        return 0
    if "--check" in sys.argv:
        print("docs/architecture.md is stale. Next: make rooms")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
