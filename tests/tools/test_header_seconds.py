"""The seconds in a notebook's first cell are those of its own run."""

import pytest
from tools import header_seconds

from failurelab_course.notebook_runs import notebooks as course

OPENING = (
    "# A title\n\nIt takes 3 seconds.\n\n*Reads in 5 minutes, runs in 40 seconds on two cores. Library stacks: today.*"
)


@pytest.mark.parametrize(("took", "said"), [(40.0, 40), (40.1, 45), (61, 65), (0.2, 5)])
def test_the_number_is_rounded_up_and_nothing_else_changes(took, said):
    assert header_seconds.rewrite(OPENING, took) == OPENING.replace("runs in 40", f"runs in {said}")


@pytest.mark.parametrize("opening", ["# A title", f"{OPENING}\n{OPENING}"])
def test_a_cell_without_one_such_number_is_an_error(opening):
    with pytest.raises(ValueError, match="does not say once"):
        header_seconds.rewrite(opening, 40)


@pytest.mark.parametrize("notebook", course.notebooks(), ids=lambda notebook: notebook.name)
def test_each_notebook_says_it_once(notebook):
    opening = notebook.content.cells[0].source
    assert header_seconds.rewrite(opening, 1).count("runs in 5 seconds") == 1
