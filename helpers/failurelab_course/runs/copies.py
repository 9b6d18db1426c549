"""The reader's own copies of the notebooks, in my_notebooks/: to run and to edit, with no answer in them yet.

The notebooks in git hold their outputs, so that they can be read on the web; who opens one of them to work through it
would read the answers before the questions. And what a reader writes into a file of git stands in the way of the next
`git pull`. So `make lab` opens copies without outputs. A copy that its reader changed is never written over.
"""

import hashlib
import json
import pathlib

from failurelab_course import eras, state_file
from failurelab_course.runs import notebooks as course
from failurelab_course.runs import stored

FOLDER = "my_notebooks"


def refresh(folder: pathlib.Path | None = None) -> list[str]:
    """Copy every notebook of the course that has no copy yet, or a copy that nobody changed; return what was kept.

    Args:
        folder: where the copies are; my_notebooks/ in the course.

    Returns:
        A line for each copy that was left alone although the course's notebook is a newer one.

    Raises:
        CourseError: a notebook of the course cannot be read.
        OSError: the folder cannot be written; every copy is whole, or as it was.
    """
    folder = folder or eras.root() / FOLDER
    list_of_copies, kept = folder / ".copies.json", []
    with state_file.locked(list_of_copies):
        written = _read(list_of_copies)
        for notebook in course.notebooks():
            path, text = folder / notebook.path.name, _without_outputs(notebook.content)
            source = _digest(text)
            if path.is_file() and _digest_of_sources(path) != written.get(path.name):
                if written.get(path.name) != source:
                    kept.append(f"{FOLDER}/{path.name} is yours and stays; the course has a newer one in notebooks/")
            elif not path.is_file() or written[path.name] != source:
                state_file.write(path, text)
                written[path.name] = source
        state_file.write(list_of_copies, json.dumps(written, indent=1) + "\n")
    return kept


def _read(path: pathlib.Path) -> dict[str, str]:
    """Return the digest of each copy as it was written; where the list is lost, every copy counts as changed."""
    try:
        written = state_file.read(path, ValueError)
    except ValueError:
        return {}
    return written if isinstance(written, dict) else {}


def _without_outputs(notebook) -> str:
    """Return the text of a copy: no outputs, and answers open once they are there."""
    copy = stored.normalise(notebook)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.metadata.get("jupyter", {}).pop("outputs_hidden", None)
    return stored.text(copy)


def _digest_of_sources(path: pathlib.Path) -> str:
    """Return the digest that the copy would have without what running it left; empty if it is no notebook."""
    try:
        return _digest(_without_outputs(stored.read(path)))
    except ValueError:
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
