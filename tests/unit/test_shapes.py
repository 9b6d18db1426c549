"""Models of random weights: of any shape that can be named, and of other families, which train; Qwen2 as Llama."""

import pytest
import torch

from failurelab_course.experiments import devices, models, shapes

IDS = torch.tensor([[21, 22, 23, 24, 25, 26], [9, 8, 7, 6, 5, 4]])


def test_the_shape_is_the_models_own():
    """Of a folder it is read; Qwen2-0.5B's is known."""
    model, _ = models.load()
    assert shapes.parameters(shapes.config("tiny")) == model.num_parameters()
    half = shapes.config("random-0.5b")
    assert (half.num_hidden_layers, half.hidden_size, half.vocab_size) == (24, 896, 151936)
    assert shapes.parameters(half) == 494032768  # as the model's card says: 0.49 billion


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
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (devices.GIB, 2 * devices.GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Pretended")
    with pytest.raises(devices.TierError, match=r"the model with its gradients needs 3\.7\. Next: --model tiny"):
        shapes.build(shapes.config("random-0.5b"), "cuda")


def test_the_small_qwen2_as_llama_is_the_same_function():
    """Same numbers of tensors, same logits, same mode; only the class is another."""
    model, tokenizer = models.load()
    llama = shapes.as_llama(model)
    assert type(llama).__name__ == "LlamaForCausalLM" and not llama.training
    assert [name for name, _ in llama.named_parameters()] == [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        torch.testing.assert_close(llama(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=2e-5, rtol=1e-5)
    assert models.accuracy(llama, tokenizer) == models.accuracy(model, tokenizer) > 0.5


def test_what_is_no_qwen2_and_an_unknown_family_are_refused():
    """Its tensors would have other names, or another meaning; the families that there are, are said."""
    with pytest.raises(ValueError, match="this is a LlamaForCausalLM"):
        shapes.as_llama(shapes.small("Llama"))
    model = shapes.small("Qwen2")
    model.config.use_sliding_window = True
    with pytest.raises(ValueError, match="sliding-window"):
        shapes.as_llama(model)
    with pytest.raises(ValueError, match="unknown family 'Qwen9': there are Qwen2, Llama"):
        shapes.small("Qwen9")


@pytest.mark.parametrize("name", list(shapes.SMALL))
def test_a_small_model_of_each_family_trains(name):
    """Every tensor that a batch uses has a gradient, and the seed decides the weights."""
    model = shapes.small(name)
    before = torch.get_rng_state()
    again, other = shapes.small(name), shapes.small(name, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(model.parameters(), again.parameters(), other.parameters()))
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    assert not all(torch.equal(one, three) for one, _, three in pairs)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.get_input_embeddings().weight.grad.any()
