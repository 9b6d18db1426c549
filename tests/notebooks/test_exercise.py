"""What a reader writes: the checker says what it misses, and the notebook runs on; figures with knobs, and the loop."""

import math
import sys

import numpy
import pytest
from matplotlib import pyplot
from tests.kernels import Notebook

from failurelab_course.notebook import display, exercise, one_screen, sliders
from failurelab_course.notebook.pictures import loop

CALLS = [
    exercise.Example("two and three", (2, 3), 5, "Add them."),
    exercise.Example("nothing and three", lambda: (0, 3), lambda sum_: sum_ == 3, "Nothing is a number too."),
]


def right(first, second):
    return first + second


@pytest.fixture
def shown(monkeypatch):
    texts = []
    monkeypatch.setattr(display, "_display", lambda data, _: texts.append(data))
    return texts


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (lambda first, second: ..., "not written yet"),
        (lambda first: first, "0 of 2 cases. At “two and three” it raised TypeError"),
        (lambda first, second: str(first + second), "it returned '5' (str), and 5 is right. Add them."),
        (lambda first, second: True, "it returned True, and 5 is right"),
        (lambda first, second: numpy.array([5, 5]), "it returned array([5, 5]) (ndarray), and 5 is right"),
        (lambda first, second: math.nan, "it returned nan, and 5 is right"),
        (lambda first, second: sys.exit(), "it raised SystemExit"),
        (lambda first, second: 5, "1 of 2 cases. At “nothing and three” it returned 5. Nothing is a number too."),
        (lambda first, second: 5 if first else None, "1 of 2 cases. At “nothing and three” it returned nothing"),
        ("5", "`the function` is str, and a function is expected"),
    ],
)
def test_an_answer_that_misses_something_is_told_in_a_line(shown, written, told):
    goes_on = exercise.check(written, right, CALLS)
    assert goes_on is right and told in shown[0]["text/plain"] and "\n" not in shown[0]["text/plain"]
    assert shown[0]["text/plain"].startswith("not yet")


def test_a_right_answer_is_what_the_notebook_goes_on_with(shown):
    def mine(first, second):
        return numpy.float64(first + second)  # a scalar of an array library is a number

    assert exercise.check(mine, right, CALLS) is mine and shown[0]["text/plain"].startswith("✓ all cases")


def test_a_checker_that_nobody_can_satisfy_is_an_error_to_its_author(shown, monkeypatch):
    """Where a reader looks it is told in a line, and the notebook goes on."""
    with pytest.raises(exercise.ExerciseError, match="the course's own right fails at “two and three”: it returned 5"):
        exercise.check(right, right, [exercise.Example("two and three", (2, 3), 6, "")])
    assert shown == []
    monkeypatch.setattr(exercise.predict, "is_interactive", lambda: True)
    assert exercise.check(lambda *_: 5, right, [exercise.Example("two and three", (2, 3), 6, "")]) is right
    assert "cannot be checked here" in shown[0]["text/plain"]


def test_knobs_stand_in_three_settings_where_nobody_looks(shown):
    drawn = []
    settings = [{"rate": rate} for rate in (1, 2, 3)]
    sliders.knobs(lambda axes, rate: drawn.append(rate), {"rate": [1, 2, 3, 4]}, settings, "a figure of rates")
    assert drawn == [1, 2, 3] and list(shown[0]) == ["image/png", "text/plain"] and len(shown) == 1


def test_a_knob_that_is_turned_draws_again():
    learner = Notebook(JPY_SESSION_NAME="notebooks/09.ipynb")
    try:
        turned = """
import ipywidgets
from failurelab_course import notebook
drawn, made = [], []
original = ipywidgets.SelectionSlider.__init__
def keep(self, *values, **named):
    made.append(self)
    original(self, *values, **named)
ipywidgets.SelectionSlider.__init__ = keep
notebook.knobs(lambda axes, rate: drawn.append(rate), {"rate": [1, 2, 3]}, [{"rate": 1}], "a figure of rates")
made[0].value = 3"""
        learner.run(turned)
        assert learner.run("drawn").value == "[1, 1, 3]"
    finally:
        learner.end()


def test_a_failure_is_one_changed_line_of_the_step(capsys):
    """Shown as a diff. That the step is TRL's, notebook 00 measures."""
    assert one_screen.step({}).__name__ == "grpo_step" and capsys.readouterr().out == ""
    one_screen.step({}, "loss = -(ratio", "loss = (ratio")
    assert "\n-    loss = -(ratio" in (said := capsys.readouterr().out) and "\n+    loss = (ratio" in said
    with pytest.raises(one_screen.NoSuchLine, match="stands 0 times"):
        one_screen.step({}, "no such line", "another")


def test_the_loop_marks_the_arrows_that_are_broken(shown):
    loop.loop({"completions": "drawn without the prompt"})
    assert "broken here: completions drawn without the prompt" in shown[0]["text/plain"]
    loop.loop()
    assert "broken" not in shown[1]["text/plain"] and shown[0]["image/png"] != shown[1]["image/png"]
    loop.loop({"log-probs": "of the prompt too"}, dear=True)
    assert "expensive here" in shown[2]["text/plain"] and "broken" not in shown[2]["text/plain"]
    loop.loop(before="load: on another GPU")
    assert "broken here: load" in shown[3]["text/plain"]
    _, axes = pyplot.subplots()
    loop.draw(axes, {"completions": "lost"})
    said = [text.get_text() for text in axes.texts]
    assert "✗ completions" in said and "rewards" in said
    with pytest.raises(ValueError, match="no arrow of the loop is called tokens: they are completions, rewards"):
        loop.loop({"tokens": "lost"})


@pytest.mark.parametrize(("right", "told"), [([5], "[5] (list) is right"), ("about 5", "about 5 is right")])
def test_what_is_right_is_shown_where_a_function_judges(shown, right, told):
    example = exercise.Example("two and three", (2, 3), lambda sum_: sum_ == 5, "Add them.", shown=right)
    exercise.check(lambda first, second: 6, int.__add__, [example])
    assert f"it returned 6, and {told}" in shown[0]["text/plain"]
