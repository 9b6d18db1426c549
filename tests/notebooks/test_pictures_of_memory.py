"""Drawings of a mechanism say in words and marks what was measured; each is drawn from plain numbers."""

import pytest
from matplotlib import pyplot

from failurelab_course.notebook import display
from failurelab_course.notebook.pictures import alignment, cache, memory


@pytest.fixture
def words(monkeypatch):
    """Return what the last figure says: its texts and its legends."""
    said = []

    def show(figure, alt):
        texts = [text.get_text() for axes in figure.axes for text in [*axes.texts, axes.title, axes._left_title]]
        texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        said[:] = [text for text in texts if text]
        pyplot.close(figure)

    monkeypatch.setattr(display, "show", show)
    return said


def test_a_run_s_blocks_are_split_by_what_allocated_them():
    """A block of the logits' own size is no slice's gradient if another operation made it."""
    blocks = [(9.0, "SliceBackward0"), (10.0, "SliceBackward0"), (10.0, "aten::linear"), (0.5, "small")]
    assert list(memory.split(blocks).values()) == [10.0, 9.0, 10.5]
    other = memory.split([(3.0, "Optimizer.step#AdamW.step")] * 7)
    assert list(other.values()) == [0, 0, 21.0]  # another moment was the peak


def test_the_bar_names_its_parts_and_its_sum(words):
    memory.bars({"short": dict.fromkeys(memory.LOOKS, 10.0)}, "the peak", "a bar of memory")
    assert "30" in words and set(memory.LOOKS) <= set(words)


def test_the_cache_s_steps_mark_what_is_in_neither(words):
    cache.steps({"kept": [(3, 0), (1, 3)], "dropped": [(3, 0), (1, 0)]}, {"dropped": "lost"}, "two calls each")
    assert {"kept", "dropped", "✗ lost", "call 2", "in neither"} <= set(words)
    # of the second calls: all four tokens, and the newest alone
    assert (words.count("4"), words.count("1")) == (2, 3)


def test_answers_that_differ_are_counted_in_words():
    figure, axes = pyplot.subplots()
    cache.agreement(axes, [True, True, True, False], {"mode": "train"})
    assert axes.get_title(loc="left") or axes.get_title()
    assert "75% the same" in axes.get_title(loc="left") + axes.get_title()
    assert axes.images[0].get_array().sum() == 1
    pyplot.close(figure)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [([1, 2], "✓ a row scores the next token"), ([0, 1], "✗ a row scores the token 2 places on")],
)
def test_arrows_say_which_token_a_row_scores(words, rows, verdict):
    alignment.arrows(["a", "b", "c", "d"], {"one stack": rows}, "rows above tokens")
    assert verdict in words
