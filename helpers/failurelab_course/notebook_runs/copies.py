"""The reader's own copies of the notebooks, in my_notebooks/: to run and to edit, with no answer in them yet.

The notebooks in git hold their outputs, so that they can be read on the web; who opens one of them to work through it
would read the answers before the questions. And what a reader writes into a file of git stands in the way of the next
`git pull`. So `make lab` opens copies without outputs. A copy that its reader changed is never written over.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
from typing import Any

from failurelab_course import eras, state_file
from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import stored

FOLDER = "my_notebooks"


def refresh(folder: pathlib.Path | None = None) -> list[str]:
    """Copy every notebook of the course that has no copy yet, or a copy that nobody changed; return what was kept.

    `folder` is where the copies are, my_notebooks/ in the course. What was kept is a line for each copy that was left
    alone although the course's notebook is a newer one.

    Raises:
        CourseError: a notebook of the course cannot be read.
        OSError: the folder cannot be written; every copy is whole, or as it was.
    """
    folder = folder or eras.root() / FOLDER
    list_of_copies, kept = folder / ".copies.json", []
    with state_file.locked(list_of_copies):
        written: dict[str, str] = {}  # each copy's digest; where it is lost, all count as changed
        with contextlib.suppress(ValueError, TypeError):
            written = dict(state_file.read(list_of_copies, ValueError) or {})
        for notebook in course.notebooks():
            path, source, mine = folder / notebook.path.name, _digest(notebook.content), ""
            with contextlib.suppress(ValueError):
                mine = _digest(stored.read(path))
            if path.is_file() and mine != written.get(path.name):
                if written.get(path.name) != source:
                    kept.append(f"{FOLDER}/{path.name} is yours and stays; the course has a newer one in notebooks/")
            elif not path.is_file() or written[path.name] != source:
                state_file.write(path, _without_outputs(notebook.content))
                written[path.name] = source
        state_file.write(list_of_copies, json.dumps(written, indent=1) + "\n")
    return kept


def open_lab() -> None:
    """Become JupyterLab, open on the first copy; .jupyter/ of the repository switches off its question about news."""
    root = eras.root()
    first = f"{FOLDER}/{course.notebooks()[0].path.name}"
    variables = os.environ | {"JUPYTER_CONFIG_PATH": str(root / ".jupyter")}
    os.execve(sys.executable, [sys.executable, "-m", "jupyterlab", f"--notebook-dir={root}", first], variables)


def _without_outputs(notebook: Any) -> str:
    """Return the text of a copy: no outputs, and answers open once they are there."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.metadata.get("jupyter", {}).pop("outputs_hidden", None)
    return stored.write_text(notebook)


def _digest(notebook: Any) -> str:
    """Return a digest of what a reader edits: the cells' sources. Running a notebook changes none."""
    sources = [[cell.cell_type, cell.source] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()
