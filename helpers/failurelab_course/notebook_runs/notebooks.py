"""The notebooks of the course: found by their names, and what each may be given to run with."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping
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

    @property
    def aliases(self) -> set[str]:
        """What it may be called: `0`, `00`, `start_here`, `00_start_here` and this with `.ipynb` are the same one."""
        number, _, title = self.name.partition("_")
        return {self.name, self.path.name, number, number.removeprefix("0"), title} - {""}

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

    def parameters(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to inject. A standard parameter at its default may be undeclared; any other must be declared.

        Raises:
            CourseError: a parameter is not declared, or its value has another type than the default.
        """
        try:
            declared, chosen = stored.declared_parameters(self.content), {}
        except (SyntaxError, ValueError) as error:
            raise CourseError(f"notebook {self.name}: its parameters cell is no list of literals: {error}") from error
        for name, value in given.items():
            kind = type(declared.get(name))
            if name not in declared:
                if (name, value) not in DEFAULTS.items():
                    raise CourseError(
                        f"notebook {self.name} has no parameter {name!r}; it declares {', '.join(declared) or 'none'}"
                    )
            elif declared[name] is None or type(value) is kind:
                chosen[name] = value
            elif (kind, type(value)) in ((float, int), (str, int), (str, float), (str, bool)):
                chosen[name] = kind(value)
            else:
                raise CourseError(
                    f"notebook {self.name}: parameter {name} is of type {kind.__name__} (default {declared[name]!r}), "
                    f"and {value!r} was given"
                )
        return chosen


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
    """Return the notebooks of these names (see `Notebook.aliases`), each once; all without a name.

    Raises:
        CourseError: a name is unknown (the message lists the known ones), or two notebooks have it.
    """
    every = notebooks(folder)
    chosen: list[Notebook] = []
    for name in names:
        same = [notebook for notebook in every if name in notebook.aliases]
        if len(same) != 1:
            many = f"{name!r} names {len(same)} notebooks" if same else f"unknown notebook {name!r}"
            raise CourseError(f"{many}: the notebooks are {', '.join(notebook.name for notebook in every)}")
        chosen += [notebook for notebook in same if notebook not in chosen]
    return chosen or every
