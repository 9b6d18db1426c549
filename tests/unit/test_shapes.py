"""Shapes without weights: for memory and placement, of any model that can be named."""

import pytest
import torch

from failurelab_course.experiments import devices as tiers
from failurelab_course.experiments import models, shapes


def test_the_shape_is_the_models_own():
    """Of a folder it is read; Qwen2-0.5B's is known."""
    model, _ = models.load()
    assert shapes.parameters(shapes.config("tiny")) == model.num_parameters()
    half = shapes.config("random-0.5b")
    assert (half.num_hidden_layers, half.hidden_size, half.vocab_size) == (24, 896, 151936)
    assert shapes.parameters(half) == 494032768  # as the model's card says: 0.49 billion
    assert shapes.told("random-0.5b") == "24 layers, width 896, vocabulary 151,936"


def test_layers_can_be_other():
    """A config of transformers 5 lists a kind for each layer; another number of layers must not leave the old list."""
    for layers in (1, 5):
        assert len(shapes.build(shapes.config("tiny", layers)).model.layers) == layers
    with pytest.raises(ValueError, match="computes nothing"):
        shapes.config("tiny", 0)


def test_weights_are_random_repeatable_and_leave_the_callers_state():
    """Two notebooks with one seed measure one model."""
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, other = (shapes.build(shapes.config("tiny", 1), dtype=torch.bfloat16, seed=seed) for seed in (0, 0))
    assert torch.rand(1) == expected
    assert one.training and one.dtype == torch.bfloat16
    assert torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_an_unknown_model_and_a_card_too_small_are_said(monkeypatch, tmp_path):
    """Before anything is made."""
    with pytest.raises(models.ModelError, match="unknown model 'tinny'"):
        shapes.config("tinny")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(models.ModelError, match="cannot be loaded"):
        shapes.config(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (tiers.GIB, 2 * tiers.GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Pretended")
    with pytest.raises(tiers.TierError, match=r"the model with its gradients needs 3\.7\. Next: --model tiny"):
        shapes.build(shapes.config("random-0.5b"), "cuda")
