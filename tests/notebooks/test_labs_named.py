"""A notebook ends by naming its labs: who has read it is told where to practise, and is not sent elsewhere."""

import re

import nbformat
import pytest

from failurelab import failures as registry
from failurelab_course import eras
from failurelab_course.labs import definition as lab_files


def named(text):
    """Return the lab numbers in a text: those after the word lab, up to the sentence's command."""
    return {number for part in re.findall(r"\b[Ll]abs?\b[^`]*", text) for number in re.findall(r"\b(\d\d)\b", part)}


@pytest.mark.parametrize(
    "lab",
    [lab for lab in lab_files.find() if any(registry.get(id).notebook for id in lab.failures)],
    ids=lambda lab: lab.number,
)
def test_a_lab_is_named_where_its_cause_is_explained(lab):
    """In a notebook on one of its failures, or in the last one, where several failures meet."""
    texts = []
    for number in {registry.get(failure).notebook[:2] for failure in lab.failures} - {""} | {"08"}:
        (path,) = (eras.root() / "notebooks").glob(f"{number}_*.ipynb")
        cells = nbformat.read(path, as_version=4).cells
        texts += [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert lab.number in named("\n".join(texts)), f"no notebook on its cause names lab {lab.number}"
