"""Drawings of notebooks 09 to 12: what they say in words is what was measured."""

import pytest
import torch
from matplotlib import pyplot

from failurelab_course.notebook.pictures import engine, rounding, sequences, tree


@pytest.fixture
def axes():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def words(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("weight", "step", "moves"),
    [(0.05, 3e-5, False), (0.05, 4e-4, True), (0.003, 3e-5, True), (1.0, 0.003, False), (1.0, 0.005, True)],
)
def test_a_weight_moves_if_the_sum_is_another_number(axes, weight, step, moves):
    assert rounding.number_line(axes, weight, step) is moves
    assert ("is rounded back" in words(axes)[-1]) is not moves


def test_weights_that_move_are_counted_without_zeros(axes):
    weights = torch.tensor([0.0, 1e-3, -1e-3, 0.1, 0.5])
    rounding.movable(axes, weights, weights.abs() < 0.01, "a step")
    moved, stayed = (sum(bar.get_height() for bar in bars) for bars in axes.containers)
    assert (moved, stayed) == (2, 2)


def test_a_draw_with_old_weights_is_marked(axes):
    lines = [(1, "load_weights", "trained"), (1, "generate", "trained"), (2, "reload_weights", "first")]
    engine.timeline(axes, lines, "two steps")
    assert not any("✗" in text for text in words(axes))
    engine.timeline(axes, [*lines, (2, "generate", "first"), (3, "sleep", "lost")], "two steps")
    assert "✗ draw" in words(axes) and "the first checkpoint" in words(axes) and "sleep" not in words(axes)


def test_weights_above_the_cap_are_drawn_as_left_out(axes):
    sequences.weights(axes, torch.tensor([0.5, 4.0, 1.0]), "three")
    assert [bar.get_hatch() or "" for bar in axes.patches] == ["", "", "////"]


def test_a_cause_that_accuses_a_healthy_run_is_marked(axes):
    tree.questions(axes, {"F16, old engine": ["1 healthy"], "learning rate": ["A"], "none of these": ["38 healthy"]})
    said = words(axes)
    assert "✗ F16, old engine: 1 healthy" in said and "learning rate: A" in said and "none of these: 38 healthy" in said


def test_a_bound_accuses_what_lies_beyond_it(axes):
    tree.bound(axes, {"healthy": [0.5, 1.5], "old": [2.5]}, 1.0, "one")
    assert words(axes) == ["healthy: 1 of 2", "old: 1 of 1"]
