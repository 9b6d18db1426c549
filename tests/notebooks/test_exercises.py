"""The exercise in each notebook: the solution passes, unwritten it is told, and wrong answers hear what they miss.

A notebook's cell tagged `exercise` has the signature that the reader fills in, and the folded one after it, tagged
`exercise-check`, the course's solution and the checker. Both are run here alone, in a namespace of their own.
`expected/NAME.py` holds `WRONG`, pairs of what a reader may write and a part of the line that they are told. `RIGHT`
has sources that differ from the course's solution and are as good.
"""

import ast
import importlib

import pytest

from failurelab_course.notebook import display, exercise
from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import stored

NOTEBOOKS = {notebook.name: notebook for notebook in course.notebooks()}
NAMES = [name for name, each in NOTEBOOKS.items() if any("exercise" in stored.tags(cell) for cell in each.code)]


def tagged(name, tag):
    """Return the source of the notebook's only code cell with this tag."""
    (source,) = [cell.source for cell in NOTEBOOKS[name].code if tag in stored.tags(cell)]
    return source


def load(name):
    """Return the module of a notebook's wrong answers."""
    return importlib.import_module(f"tests.notebooks.expected.{name}")


@pytest.fixture
def check(monkeypatch):
    """Return a function that runs the checker on what a reader wrote: the names after it, and the told line."""

    def run(name, written, names=None):
        told = []
        monkeypatch.setattr(display, "_display", lambda data, _: told.append(data["text/plain"]))
        names = names or {"__name__": "__main__", "device": "cpu", "seed": 0, "exercise": exercise}
        for source in (written, tagged(name, "exercise-check")):
            exec(compile(source, f"{name}, the exercise", "exec"), names)
        (line,) = told
        return names, line

    return run


def test_wrong_answers_are_kept_for_every_exercise():
    """A checker that no wrong answer was tried on may accept anything."""
    assert [name for name in NOTEBOOKS if hasattr(load(name), "WRONG")] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_goes_on_with_the_solution(name, check):
    """Unwritten, it is told, and told again if the cell runs again; the course's function passes where a reader has it.

    From then on the name is the course's function. A second run must not call it the reader's.
    """
    (function,) = [node for node in ast.parse(tagged(name, "exercise")).body if isinstance(node, ast.FunctionDef)]
    assert ast.get_docstring(function), "the exercise's function says in its docstring what it returns"
    names, line = check(name, tagged(name, "exercise"))
    assert line.startswith("not yet: ") and "is not written yet" in line, line
    solution = names[function.name]
    assert solution is not None
    names, again = check(name, f"{function.name} = theirs", names | {"theirs": solution})
    assert again == line and names[function.name] is not solution, again
    _, line = check(name, f"{function.name} = lambda *given: theirs(*given)", names | {"theirs": solution})
    assert line.startswith("✓ all cases"), line


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_hears_what_it_misses(name, check):
    wrong = load(name).WRONG
    assert len(wrong) >= 3
    for written, part in wrong:
        _, line = check(name, written)
        assert line.startswith("not yet: ") and part in line, (written, line)


@pytest.mark.parametrize("name", NAMES)
def test_another_right_answer_passes(name, check):
    for written in getattr(load(name), "RIGHT", []):
        _, line = check(name, written)
        assert line.startswith("✓ all cases"), (written, line)
