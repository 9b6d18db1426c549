"""Drawings of a mechanism say in words and marks what was measured; each is drawn from plain numbers."""

import pytest
import torch
from matplotlib import pyplot

from failurelab.textbook import balance
from failurelab_course.notebook import display, toys
from failurelab_course.notebook.pictures import (
    alignment,
    autograd,
    cache,
    curves,
    groups,
    halves,
    ledger,
    memory,
    rounding,
)


@pytest.fixture
def words(monkeypatch):
    """Return what the last figure says: its titles, texts and legends."""
    said = []

    def show(figure, alt):
        texts = [text.get_text() for axes in figure.axes for text in [axes.title, axes._left_title, *axes.texts]]
        texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        said[:] = [text for text in texts if text]
        pyplot.close(figure)

    monkeypatch.setattr(display, "show", show)
    return said


@pytest.fixture
def axes():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_groups_whose_rewards_are_equal_are_marked(words):
    rows = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.1 + 0.2, 0.3]]
    groups.groups({"one run": rows}, alt="three of four")
    assert words == ["one run\n3 of 4 groups silent", *["="] * 3]


class Chain(torch.nn.Module):
    """Parts named as in Llama and Qwen, of which only the second layer is trainable."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens, self.model.norm = torch.nn.Embedding(2, 2), torch.nn.Linear(2, 2)
        self.model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        self.lm_head = torch.nn.Linear(2, 1)
        self.requires_grad_(False)
        self.model.layers[1].requires_grad_(True)

    def forward(self, ids):
        first, second = self.model.layers
        x = self.model.norm(second(first(self.model.embed_tokens(ids))))
        return toys.SimpleNamespace(loss=self.lm_head(x).mean())


def test_a_trace_ends_where_nothing_trainable_lies_before(words):
    model = Chain()
    traced = autograd.trace(model, lambda: model(torch.tensor([0, 1])).loss.backward())
    assert traced == [
        ("embed_tokens", 0, 0, False),
        ("layers.0", 0, 0, False),
        ("layers.1", 2, 2, True),
        ("norm", 0, 0, True),
        ("lm_head", 0, 0, True),
    ]
    cut = [*traced[:2], ("layers.1", 0, 2, False), ("norm", 0, 0, False), ("lm_head", 0, 0, False)]
    autograd.chains({"sound": traced, "cut": cut}, alt="a sound chain and a cut one")
    assert {"sound", "cut", "✓ 2 of 2", "✗ 0 of 2"} <= set(words) and words.count("no graph") == 3
    with pytest.raises(IndexError):
        autograd.trace(model, lambda: model(torch.tensor([2])))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_states_are_read_from_the_evidence_with_their_spread(words, capsys):
    cases = {"broken": "curve: broken", "repair: both": "curve: both repaired"}
    runs = curves.states("rollout_curves", cases | {"healthy": "curve: checkpointing off"}, "three states", by_hand=0.4)
    assert list(runs) == ["broken", "repair: both", "healthy"] and {len(each.last) for each in runs.values()} == {3}
    assert max(runs["broken"].last) < 0.4 < min(runs["healthy"].by_hand)
    coincide = "The lines of “repair: both” and “healthy” coincide."
    assert {"broken", "repair: both", "healthy", "by hand, before (± 0.02)", coincide} == set(words)
    broken, repaired, healthy = capsys.readouterr().out.splitlines()[2:]
    assert broken.endswith("below all of them") and repaired.endswith("among them") and healthy.endswith(")")
    case = "misalignment: as released"  # told apart by the era
    runs = curves.states("misalignment", {"broken": (case, "trl-0.14-tf-4.52"), "healthy": (case, "trl-0.14")}, "two")
    assert max(runs["broken"].last) < 0.5 < min(runs["healthy"].last)
    with pytest.raises(ValueError, match="begins with no state"):
        curves.states("rollout_curves", {"mended": "curve: broken"}, "three states")


def test_a_run_counts_as_apart_only_where_no_seed_overlaps():
    places = [curves.place(runs, [3, 5]) for runs in ([1, 2], [1, 3], [6, 7])]
    assert places == ["below all of them", "among them", "above all of them"]


def test_a_run_s_blocks_are_split_by_what_allocated_them():
    """A block of the logits' own size is no slice's gradient if another operation made it."""
    blocks = [(9.0, "SliceBackward0"), (10.0, "SliceBackward0"), (10.0, "aten::linear"), (0.5, "small")]
    assert list(memory.split(blocks).values()) == [10.0, 9.0, 10.5]


def test_the_cache_s_steps_mark_what_is_in_neither(words):
    cache.steps({"kept": [(3, 0), (1, 3)], "dropped": [(3, 0), (1, 0)]}, {"dropped": "lost"}, "two calls each")
    assert {"kept", "dropped", "✗ lost", "call 2", "in neither"} <= set(words)
    # of the second calls: all four tokens, and the newest alone
    assert (words.count("4"), words.count("1")) == (2, 3)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [([1, 2], "✓ a row scores the next token"), ([0, 1], "✗ a row scores the token 2 places on")],
)
def test_arrows_say_which_token_a_row_scores(words, rows, verdict):
    alignment.arrows(["a", "b", "c", "d"], {"one stack": rows}, "rows above tokens")
    assert verdict in words


@pytest.mark.parametrize(
    ("weight", "step", "moves"),
    [(0.05, 3e-5, False), (0.05, 4e-4, True), (1.0, 0.003, False)],
)
def test_a_weight_moves_if_the_sum_is_another_number(axes, weight, step, moves):
    assert rounding.number_line(axes, weight, step) is moves
    assert ("is rounded back" in texts(axes)[-1]) is not moves


def test_weights_that_move_are_counted_without_zeros(axes):
    weights = torch.tensor([0.0, 1e-3, -1e-3, 0.1, 0.5])
    rounding.movable(axes, weights, weights.abs() < 0.01, "a step")
    moved, stayed = (sum(bar.get_height() for bar in bars) for bars in axes.containers)
    assert (moved, stayed) == (2, 2)


def test_each_rank_is_a_box_of_the_same_area(monkeypatch):
    areas = []
    boxes = lambda figure, alt: [each.get_width() * each.get_height() for each in figure.axes[0].patches]  # noqa: E731
    monkeypatch.setattr(display, "show", lambda *given: areas.extend(boxes(*given)))
    halves.halves([1, 3], alt="two boxes")
    assert areas == [2, 2]  # half of the four tokens


@pytest.mark.parametrize("scored", [-0.8, -0.2])
def test_the_ledger_shows_what_was_drawn_what_is_scored_and_what_is_only_read(scored):
    draw = balance.Draw(0, 1, 0, (7, 8), (3, 2), True, logps=(-0.5, -0.1))
    tokens = balance.Token(2, 3, 0.002, scored), balance.Token(3, 9, 0.002, -8.0)
    row = balance.Trained(0, 0, 0, (7, 8, 3, 9, 4), tokens)
    cells = ledger.read_cells(row, [(balance.DRAWN, draw), (balance.FOREIGN, None)])
    assert cells[0, 1] == (2, -0.1, "drawn") and cells[2, 1] == (None, 2.0, "foreign")
    assert [cells[1, place][2] for place in range(3)] == ["apart", "foreign", "read"] and (2, 2) not in cells
