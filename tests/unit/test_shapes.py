"""The small Qwen2 as a Llama: the same function in another class."""

import copy

import pytest
import torch

from failurelab_course.experiments import models, shapes

IDS = torch.tensor([[21, 22, 23, 24, 25, 26], [9, 8, 7, 6, 5, 4]])


def test_the_small_qwen2_as_llama_is_the_same_function():
    """Same numbers of tensors, same logits, same mode; only the class is another."""
    model, tokenizer = models.load()
    llama = shapes.as_llama(model)
    assert type(llama).__name__ == "LlamaForCausalLM" and not llama.training
    assert [name for name, _ in llama.named_parameters()] == [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        torch.testing.assert_close(llama(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=2e-5, rtol=1e-5)
    assert models.accuracy(llama, tokenizer) == models.accuracy(model, tokenizer) > 0.5


def test_what_is_no_qwen2_is_refused():
    """Its tensors would have other names, or another meaning."""
    model, _ = models.load()
    with pytest.raises(ValueError, match="this is a LlamaForCausalLM"):
        shapes.as_llama(shapes.as_llama(model))
    model = copy.deepcopy(model)
    model.config.use_sliding_window = True
    with pytest.raises(ValueError, match="sliding-window"):
        shapes.as_llama(model)
