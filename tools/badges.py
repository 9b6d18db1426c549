"""The repository's address, from the one file that has it to where readers meet it: python -m tools.badges [--check]

It stands in CITATION.cff, as `repository-code: https://github.com/OWNER/NAME`. From there it is written into README's
and the notebooks' badges, into the first cell of each notebook, which fetches the course on Colab and Kaggle, into the
lines that readers copy, and into tools/rented.py. Without that line there are no badges, nothing is fetched unasked,
and readers are told to put the address in themselves. With --check nothing is written; status 1 names what is not so.
"""

import pathlib
import re
import sys
from typing import Any

from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import stored

ROOT = pathlib.Path(__file__).resolve().parent.parent
GITHUB = "https://github.com/"
PLACEHOLDER = "ADDRESS-OF-THIS-REPOSITORY"
ARCHIVE = "/archive/main.tar.gz"
BADGES = re.compile(r"<!-- badges -->\n(.*?)<!-- end badges -->", re.DOTALL)
# In pages: what readers copy.
COPIED = re.compile(rf"(?<=git clone )\S+(?= grpo-failure-lab\b)|(?<=FAILURELAB_COURSE=)\S+(?={re.escape(ARCHIVE)})")
# In a notebook's first cell, from a line to a line: how the course comes to where it is not installed.
SHARED = re.compile(r"^except ImportError as error:\n.*?^    hosted\.prepare\(\)\n", re.MULTILINE | re.DOTALL)
FETCH = """except ImportError as error:
    import os
    import pathlib
    import shutil
    import sys
    import urllib.request

    line = f"{error}. Next: clone this course, `make lab`, or docs/hosted.md"
    home, source = map(os.getenv, ("FAILURELAB_HOME", "FAILURELAB_COURSE"))
DEFAULT    try:
        if source and not home:
            file, _ = urllib.request.urlretrieve(source)
            shutil.unpack_archive(file, "course", "gztar")
            home = next(pathlib.Path("course").glob("*/eras")).parent
    except (OSError, EOFError, StopIteration) as failed:
        line = f"{source} did not bring the course, {failed!r}: run this again"
    if not home:
        error._render_traceback_ = lambda: [line]
        raise
    sys.path.insert(0, os.path.abspath(f"{home}/helpers"))
    from failurelab_course.eras import hosted

    hosted.prepare()
"""
# Only there: a kernel of another environment, in a clone, must not fetch a second one.
DEFAULT = """    if {{"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}} & {{*os.environ}}:
        source = source or ("{address}"
                            "{archive}")
"""


class AddressError(Exception):
    """The address is none that Colab and Kaggle open notebooks from, or a file lacks the place for it."""


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
    """Return what the first cells share: how the course comes to where it is not installed."""
    return FETCH.replace("DEFAULT", DEFAULT.format(address=address, archive=ARCHIVE) if address else "")


def write_notebook(notebook: Any, name: str, address: str) -> None:
    """Put the address into a notebook: badges under its title, and into its first cell.

    Raises:
        AddressError: its first code cell after the parameters has no place for it.
    """
    title, _, text = notebook.cells[0].source.partition("\n\n")
    text = re.sub(r"\A\[!\[Open in .*\n\n", "", text)
    notebook.cells[0].source = "\n\n".join(filter(None, [title, make_badges(address, name), text]))
    first = [cell for cell in notebook.cells if cell.cell_type == "code"][1]
    if not SHARED.search(first.source):
        raise AddressError(f"{name}: its first cell does not fetch the course. Next: copy that of another notebook")
    first.source = SHARED.sub(lambda _: make_fetch(address), first.source)


def write_page(text: str, address: str, first: str) -> str:
    """Return a page's text with the address: its badges, which open the first notebook, and what readers copy."""
    line = make_badges(address, first)
    text = BADGES.sub(lambda _: f"<!-- badges -->\n{line + chr(10) if line else ''}<!-- end badges -->", text)
    return COPIED.sub(address or PLACEHOLDER, text)


def write_all(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Return the text that each file has to have, by its path; raises as `read_address` and `write_notebook`."""
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
