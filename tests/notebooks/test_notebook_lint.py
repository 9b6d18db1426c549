"""The course's notebooks hold to the rules of the lint, and each rule finds what a reader must not meet."""

import copy

import pytest
from nbformat.v4 import new_output
from tools import notebook_lint, store_outputs

from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import stored

ANY = ""


@pytest.fixture
def notebook():
    """A notebook of the course, to be spoilt."""
    return copy.deepcopy(course.find(["09"])[0].content)


def cells(notebook, words):
    """Return the code cells that hold these words, or this tag."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in code if words in cell.source or words in stored.tags(cell)]


def write(words, source):
    return lambda notebook: cells(notebook, words)[0].update(source=source)


def put_out(output):
    return lambda notebook: cells(notebook, ANY)[-1].update(outputs=[output])


def spoil_picture(notebook):
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).get("image/png", {}).update(alt="plot")


def spoil_verdict(notebook):
    cells(notebook, stored.CHECKED)[0].outputs[0].data["text/plain"] = "loss 0.6931"


PLANTED = {
    "stored": lambda notebook: notebook.metadata.kernelspec.update(name="my-env"),
    "parameters": write("parameters", 'device = "cuda"\nmodel = "tiny"\nseed = 0'),
    "error": put_out(new_output("error", ename="ValueError", evalue="", traceback=[])),
    "differs": put_out(new_output("stream", name="stdout", text="saved to /home/ann/out\n")),
    "shown": spoil_picture,
    "source": write(ANY, "!pip install trl"),
    "opening": lambda notebook: notebook.cells[0].update(source="# Some text"),
    "script": write("script", "from failurelab import guards"),
    "slides": lambda notebook: notebook.cells[0].metadata.clear(),
    "folded": lambda notebook: cells(notebook, "predict.answer(")[0].metadata.jupyter.pop("outputs_hidden"),
    "questions": write("predict.answer(", "never = 'answered'"),
    "nbval": spoil_verdict,
}


@pytest.mark.parametrize("rule", notebook_lint.RULES)
def test_each_rule_fires(notebook, rule):
    PLANTED[rule](notebook)
    assert rule in {line.partition(":")[0] for line in notebook_lint.check("09_rounded_away", notebook)}


def test_the_course_s_notebooks_hold():
    """Next, where one does not: make outputs NAME=..., or what the line says."""
    assert [line for each in course.notebooks() for line in notebook_lint.check(each.name, each.content)] == []


def test_what_papermill_and_jupyterlab_add_goes_and_what_a_reader_needs_stays(notebook):
    untidy = copy.deepcopy(notebook)
    untidy.metadata.update(papermill={"duration": 3.2}, widgets={})
    for number, cell in enumerate(cells(untidy, ANY), 7):
        cell.metadata.update(papermill={"duration": 1}, collapsed=True)
        cell.execution_count = number
    assert store_outputs.normalise(untidy) == notebook
