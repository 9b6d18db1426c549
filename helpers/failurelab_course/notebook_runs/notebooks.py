"""The notebooks of the course, found by their names."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable
from typing import Any

from failurelab.errors import FailureLabError
from failurelab_course import eras
from failurelab_course.notebook_runs import stored

# The fast CPU tier: only papermill injects other values, so these defaults are what a reader runs.
DEFAULTS = {"device": "cpu", "model": "tiny", "seed": 0}


class CourseError(FailureLabError):
    """The notebooks cannot be run as asked; the message says what was found and the next step."""


@dataclasses.dataclass(frozen=True)
class Notebook:
    """One notebook of the course, before it runs."""

    path: pathlib.Path

    @property
    def name(self) -> str:
        """Its name, such as `00_start_here`."""
        return self.path.stem

    @functools.cached_property
    def content(self) -> Any:
        """The parsed notebook.

        Raises:
            CourseError: the file cannot be read as one.
        """
        try:
            return stored.read(self.path)
        except ValueError as error:
            raise CourseError(f"notebook {error}. Next: git checkout {self.path.name}") from error

    @property
    def code(self) -> list[Any]:
        """Its code cells, empty ones left out."""
        return [cell for cell in self.content.cells if cell.cell_type == "code" and cell.source.strip()]


def notebooks(folder: pathlib.Path | None = None) -> list[Notebook]:
    """Return all notebooks of the course, or of another folder, in their order.

    Raises:
        CourseError: there is none.
    """
    folder = folder or eras.root() / "notebooks"
    listed = [Notebook(path) for path in sorted(folder.glob("[0-9]*.ipynb"))]
    if not listed:
        raise CourseError(f"no notebook is in {folder}. Next: git checkout notebooks")
    return listed


def find(names: Iterable[str] = (), folder: pathlib.Path | None = None) -> list[Notebook]:
    """Return the notebooks of these names or numbers (`1`, `01` or `01_requires_grad_warning`); all without a name.

    Raises:
        CourseError: a name is unknown; the message lists the known ones.
    """
    every = notebooks(folder)
    chosen = []
    for asked in names:
        fits = [each for each in every if asked in (each.name, each.path.name) or asked.zfill(2) == each.name[:2]]
        if not fits:
            known = ", ".join(notebook.name for notebook in every)
            raise CourseError(f"unknown notebook {asked!r}: the notebooks are {known}")
        chosen += fits
    return list(dict.fromkeys(chosen)) or every
