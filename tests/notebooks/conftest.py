"""Small notebooks planted in a temporary folder: they import little, so that a run costs a kernel's start."""

import pathlib

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PARAMETERS = 'device = "cpu"\nmodel = "tiny"\nseed = 0'


class Planted:
    """Writes notebooks into `folder`."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def __call__(self, name: str, *cells: str, parameters: str | None = PARAMETERS) -> pathlib.Path:
        """Write a notebook of code cells, after a cell tagged `parameters` if there is one; return its path."""
        made = [new_markdown_cell(f"# {name}")]
        if parameters is not None:
            made.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
        made += [new_code_cell(source) for source in cells]
        for number, cell in enumerate(made):
            cell["id"] = f"cell-{number}"
        spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        path = self.folder / f"{name}.ipynb"
        nbformat.write(new_notebook(cells=made, metadata=spec), path)
        return path


@pytest.fixture
def plant(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    return Planted(folder)


@pytest.fixture(scope="module")
def plant_once(tmp_path_factory):
    return Planted(tmp_path_factory.mktemp("notebooks"))
