"""Every cell of a notebook run twice, as learners do: no error, and the second run says what the first said.

A copy of the notebook has each of its code cells twice, and papermill runs it. Then the first of each two is taken
out, and the marked outputs are compared with the stored ones, as those of a plain run are.
"""

import nbformat
import pytest
from tests.notebooks.test_notebooks import NAMES, compare

from failurelab_course import eras
from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import runs, stored


def double(path, folder):
    """Write a copy in which each code cell but the parameters' stands twice; return its path."""
    notebook = stored.read(path)
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "code" and cell.source.strip() and "parameters" not in stored.tags(cell):
            cells.append(nbformat.from_dict(cell | {"id": f"{cell.id[:50]}-again"}))
    notebook.cells = cells
    copy = folder / path.name
    copy.write_text(stored.write_text(notebook))
    return copy


def leave_second(path):
    """Take the first of each two cells out of an executed copy."""
    notebook = stored.read(path)
    following = [*notebook.cells[1:], None]
    notebook.cells = [
        cell for cell, after in zip(notebook.cells, following) if not after or after.id != f"{cell.id[:50]}-again"
    ]
    path.write_text(stored.write_text(notebook))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs_twice(name, tmp_path, request, monkeypatch):
    (notebook,) = course.find([name])
    for beside in ("evidence", "benchmarks"):  # which notebooks read beside their own folder
        (tmp_path / beside).symlink_to(eras.root() / beside)
    (folder := tmp_path / "doubled").mkdir()
    double(notebook.path, folder)
    (result,) = runs.run([name], folder=folder, out=tmp_path / "run", jobs=1, time_limit=1800)
    if result.status == "NOT RUN":
        pytest.skip(f"NOT RUN: {result.reason}")
    assert result.status == "PASS", f"{result.reason} (see {result.html})"
    leave_second(result.copy)
    differences = compare(notebook.path, result.copy, request, monkeypatch)
    assert [text for text in differences if text] == []
    assert len(differences) == sum(stored.CHECKED in stored.tags(cell) for cell in notebook.code) > 0
