"""Other families: the same weights as Llama compute the same; the small ones train."""

import pytest
import torch

from failurelab_course.experiments import families, models

IDS = torch.tensor([[21, 22, 23, 24, 25, 26], [9, 8, 7, 6, 5, 4]])


def test_the_small_qwen2_as_llama_is_the_same_function():
    """Same numbers of tensors, same logits, same mode; only the class is another."""
    model, tokenizer = models.load()
    llama = families.as_llama(model)
    assert type(llama).__name__ == "LlamaForCausalLM" and not llama.training
    assert [name for name, _ in llama.named_parameters()] == [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        torch.testing.assert_close(llama(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=2e-5, rtol=1e-5)
    assert models.accuracy(llama, tokenizer) == models.accuracy(model, tokenizer) > 0.5


def test_what_is_no_qwen2_is_refused():
    """Its tensors would have other names, or another meaning."""
    with pytest.raises(ValueError, match="this is a LlamaForCausalLM"):
        families.as_llama(families.small("Llama"))
    model = families.small("Qwen2")
    model.config.use_sliding_window = True
    with pytest.raises(ValueError, match="sliding-window"):
        families.as_llama(model)


@pytest.mark.parametrize("name", list(families.SMALL))
def test_a_small_model_of_each_family_trains(name):
    """Every tensor that a batch uses has a gradient, and the seed decides the weights."""
    model = families.small(name)
    before = torch.get_rng_state()
    again, other = families.small(name), families.small(name, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(model.parameters(), again.parameters(), other.parameters()))
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    assert not all(torch.equal(one, three) for one, _, three in pairs)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.get_input_embeddings().weight.grad.any()


def test_an_unknown_family_is_refused():
    """The names that there are, are said."""
    with pytest.raises(ValueError, match="unknown family 'Qwen9': there are Qwen2, Llama"):
        families.small("Qwen9")
