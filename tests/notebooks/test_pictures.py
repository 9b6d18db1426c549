"""Drawings of a mechanism show what was measured: silent groups, the cut edge of a graph, curves that are kept."""

import pytest
import torch
from matplotlib import pyplot

from failurelab_course.notebook import display, toys
from failurelab_course.notebook.pictures import autograd, curves, groups


@pytest.fixture
def shown(monkeypatch):
    """The figures that are shown: their words, and their texts for those who do not see them."""
    figures = []

    def keep(figure, alt):
        texts = [text.get_text() for axes in figure.axes for text in axes.texts]
        titles = [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes]
        figures.append((titles, texts, alt))
        pyplot.close(figure)

    monkeypatch.setattr(display, "show", keep)
    return figures


def test_groups_whose_rewards_are_equal_are_marked(shown):
    rows = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.1 + 0.2, 0.3]]
    groups.groups({"one run": rows}, alt="three of four")
    ((titles, texts, alt),) = shown
    assert titles == ["one run\n3 of 4 groups silent"] and texts == ["="] * 3 and alt == "three of four"


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


def test_a_trace_ends_where_nothing_trainable_lies_before(shown):
    model = Chain()
    traced = autograd.trace(model, lambda: model(torch.tensor([0, 1])).loss.backward())
    assert traced == [
        ("embed_tokens", 0, 0, False),
        ("layers.0", 0, 0, False),
        ("layers.1", 2, 2, True),
        ("norm", 0, 0, True),
        ("lm_head", 0, 0, True),
    ]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    cut = [*traced[:2], ("layers.1", 0, 2, False), ("norm", 0, 0, False), ("lm_head", 0, 0, False)]
    autograd.chains({"sound": traced, "cut": cut}, alt="a sound chain and a cut one")
    ((titles, texts, _),) = shown
    assert titles == ["sound", "cut"] and texts.count("no graph") == 3 and "✓ 2 of 2" in texts and "✗ 0 of 2" in texts


def test_a_hook_goes_also_where_the_pass_fails():
    model = Chain()
    with pytest.raises(IndexError):
        autograd.trace(model, lambda: model(torch.tensor([2])))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_curves_come_from_the_evidence_by_label(shown):
    rewards = curves.curves("rollout_curves", {"cut off": "curve: broken"}, 0.4, "A title", "three broken runs")
    assert list(rewards) == ["cut off"] and len(rewards["cut off"]) == 3 and shown[0][0] == ["A title"]


def test_a_toy_is_broken_as_it_says():
    """The checkers of two exercises rest on it."""
    sound, cut = toys.Toy(), toys.Toy(checkpointed=True)
    for model in (sound, cut):
        model().loss.backward()
    assert sound.layer.weight.grad is not None and cut.layer.weight.grad is None
    hooked = toys.Toy(frozen=True, hooked=True)
    assert hooked().loss.requires_grad and not any(tensor.requires_grad for tensor in hooked.parameters())
    assert not toys.Toy(frozen="rest", checkpointed=True)().loss.requires_grad
