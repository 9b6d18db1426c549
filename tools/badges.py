"""The repository's address, from the one file that has it to where readers meet it: python -m tools.badges [--check]

It stands in CITATION.cff, as `repository-code: https://github.com/OWNER/NAME`. From there it is written into README's
and the notebooks' badges, into a cell of each notebook that fetches the course on Colab and Kaggle, and into the lines
that readers copy. Without that line there are no badges, nothing is fetched unasked, and readers are told to put the
address in themselves. With --check nothing is written; status 1 names what is not so.
"""

import pathlib
import re
import sys
from typing import Any

import nbformat

from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import stored

ROOT = pathlib.Path(__file__).resolve().parent.parent
GITHUB = "https://github.com/"
PLACEHOLDER = "ADDRESS-OF-THIS-REPOSITORY"
BADGES = re.compile(r"<!-- badges -->\n(.*?)<!-- end badges -->", re.DOTALL)
# In pages: what readers copy.
COPIED = re.compile(r'(?<=git clone )\S+(?= grpo-failure-lab\b)|(?<=^course = ")\S+(?="$)', re.MULTILINE)
# The cell that brings the course to where it is not installed; docs/hosted.md shows it to who opens a notebook alone.
FETCH = """from urllib.request import urlopen

course = "ADDRESS"
try:
    exec(urlopen(f"{course}/raw/main/tools/fetch_course.py").read())
    fetch(f"{course}/archive/main.tar.gz")
except (OSError, EOFError, StopIteration) as error:
    line = f"{course} did not bring the course, {error!r}: run this again"
    error._render_traceback_ = line.splitlines
    raise"""
# Only there: a kernel of another environment, in a clone, must not fetch a second one.
HOSTED = """import os

if {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"} & {*os.environ}:
    """


class AddressError(Exception):
    """The address is none that Colab and Kaggle open notebooks from."""


def read_address(root: pathlib.Path) -> str:
    """Return the repository's address; empty where none is set.

    Raises:
        AddressError: it is not `https://github.com/OWNER/NAME`.
    """
    text = (root / "CITATION.cff").read_text(encoding="utf-8")
    line = re.search(r"^repository-code:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)
    address = line[1].strip("\"'").rstrip("/").removesuffix(".git") if line else ""
    if address and not re.fullmatch(re.escape(GITHUB) + r"[\w.-]+/[\w.-]+", address):
        raise AddressError(
            f"CITATION.cff names {address}, and Colab and Kaggle open notebooks of a public repository on GitHub. "
            "Next: repository-code: https://github.com/OWNER/NAME, or no such line"
        )
    return address


def make_badges(address: str, name: str) -> str:
    """Return a line with the badges that open a notebook, in Markdown; empty without an address."""
    if not address:
        return ""
    file = f"/blob/main/notebooks/{name}.ipynb"
    colab = f"https://colab.research.google.com/github/{address.removeprefix(GITHUB)}{file}"
    kaggle = f"https://kaggle.com/kernels/welcome?src={address}{file}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]({kaggle})"
    )


def make_fetch(address: str) -> str:
    """Return the cell that fetches the course on Colab and Kaggle, and does nothing elsewhere."""
    return HOSTED + FETCH.replace("ADDRESS", address).replace("\n", "\n    ")


def write_notebook(notebook: Any, name: str, address: str) -> None:
    """Put the address into a notebook: badges under its title, and the cell that fetches; without one, neither."""
    title, _, text = notebook.cells[0].source.partition("\n\n")
    text = re.sub(r"\A\[!\[Open in .*\n\n", "", text)
    notebook.cells[0].source = "\n\n".join(filter(None, [title, make_badges(address, name), text]))
    cells = [cell for cell in notebook.cells if cell.id != "fetch"]
    if address:  # only a hosted runtime runs it
        folded = cells[1].metadata | {"tags": ["nbval-skip", "skip-execution"]}
        cells.insert(1, nbformat.v4.new_code_cell(make_fetch(address), id="fetch", metadata=folded))
    notebook.cells = cells


def write_page(text: str, address: str, first: str) -> str:
    """Return a page's text with the address: its badges, which open the first notebook, and what readers copy."""
    line = make_badges(address, first)
    text = BADGES.sub(lambda _: f"<!-- badges -->\n{line + chr(10) if line else ''}<!-- end badges -->", text)
    return COPIED.sub(address or PLACEHOLDER, text)


def write_all(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Return the text that each file has to have, by its path; raises as `read_address`."""
    address, texts = read_address(root), {}
    notebooks = course.find([], root / "notebooks")
    for each in notebooks:
        notebook = stored.read(each.path)
        write_notebook(notebook, each.name, address)
        texts[each.path] = stored.write_text(notebook)
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        texts[page] = write_page(page.read_text(encoding="utf-8"), address, notebooks[0].name)
    return texts


def main(words: list[str]) -> int:
    """Write the address where it is not as in CITATION.cff; return 1 if a file was not so and none is written."""
    try:
        texts = write_all(ROOT)
    except AddressError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'not as' if '--check' in words else 'written from'} CITATION.cff")
        if "--check" not in words:
            path.write_text(texts[path], encoding="utf-8")
    if not stale:
        print(f"badges agree with CITATION.cff: {read_address(ROOT) or 'no address, so there are none'}")
    return int("--check" in words and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
