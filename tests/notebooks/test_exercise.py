"""What a reader writes: the checker says what it misses, and the notebook runs on; figures with knobs, and the loop."""

import math
import sys

import ipywidgets
import numpy
import pytest
import torch
from matplotlib import pyplot

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
        (lambda first, second: str(first + second), "'5' (str)"),
        (lambda first, second: True, "True"),
        (lambda first, second: numpy.array([5, 5]), "array([5, 5])"),
        (lambda first, second: math.nan, "nan"),
        (lambda first, second: sys.exit(), "SystemExit"),
        (lambda first, second: 5, "1 of 2 cases. At “nothing and three” it returned 5. Nothing is a number too."),
        ("5", "a function is expected"),
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


def test_knobs_stand_in_settings_where_nobody_looks_and_draw_again_when_turned(shown, monkeypatch):
    drawn, boxes = [], []
    given = (
        lambda axes, rate: drawn.append(rate),
        {"rate": [1, 2, 3, 4]},
        [{"rate": 1}, {"rate": 2}],
        "figures of rates",
    )
    sliders.knobs(*given)
    assert drawn == [1, 2] and list(shown[0]) == ["image/png", "text/plain"] and len(shown) == 1
    monkeypatch.setattr(exercise.predict, "is_interactive", lambda: True)
    monkeypatch.setattr(ipywidgets, "VBox", lambda children: boxes.append(children) or ipywidgets.Box(children))
    sliders.knobs(*given)
    boxes[0][0].value = 3
    assert drawn == [1, 2, 1, 2, 1, 3]


def test_a_failure_is_one_changed_line_of_the_step(capsys):
    """Shown as a diff. That the step is TRL's, notebook 00 measures."""
    assert one_screen.step({}).__name__ == "grpo_step" and capsys.readouterr().out == ""
    one_screen.step({}, "loss = -(ratio", "loss = (ratio")
    assert "\n-    loss = -(ratio" in (said := capsys.readouterr().out) and "\n+    loss = (ratio" in said
    with pytest.raises(one_screen.NoSuchLine, match="stands 0 times"):
        one_screen.step({}, "no such line", "another")


def test_two_steps_are_taken_on_copies_of_a_policy_that_accelerate_has_prepared():
    policy = torch.nn.Linear(2, 1)
    policy.forward = lambda drawn, own=policy.forward: own(drawn)  # as accelerate wraps it: no copy has its own

    def take(copied, optimizer, prompts, answers, drawn):
        copied(drawn).sum().backward()
        optimizer.step()
        return 0.5, 0.0

    measured = one_screen.beside(take, take, policy, [], [], torch.ones(1, 2))
    assert measured == (pytest.approx(1), 0.5, 0.5) and policy.weight.grad is None


def test_the_loop_marks_the_arrows_that_are_broken(shown):
    loop.loop({"completions": "drawn without the prompt"})
    assert "broken here: completions drawn without the prompt" in shown[0]["text/plain"]
    loop.loop({"log-probs": "of the prompt too"}, dear=True)
    assert "expensive here" in shown[1]["text/plain"] and "broken" not in shown[1]["text/plain"]
    _, axes = pyplot.subplots()
    loop.draw(axes, {"completions": "lost"})
    said = [text.get_text() for text in axes.texts]
    assert "✗ completions" in said and "rewards" in said
    with pytest.raises(ValueError, match="no arrow of the loop is called tokens"):
        loop.loop({"tokens": "lost"})
