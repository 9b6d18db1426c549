"""The known-answer probe: a right function passes, a wrong one is told what it does instead."""

import functools

import pytest
import torch
import transformers
from small import cut_from_the_front, other_keep_argument, qwen2, score
from torch import nn

from failurelab import logits
from failurelab_course.experiments import models

# A Qwen2 as it is before any training: logits of all tokens are near 0.
random_model = functools.partial(qwen2, vocab_size=500, tie_word_embeddings=False)
MODELS = {
    "trained": lambda: models.load("tiny")[0],
    "random": random_model,
    "random bfloat16": lambda: random_model(dtype=torch.bfloat16),
    "trained bfloat16": lambda: models.load("tiny", dtype=torch.bfloat16)[0],
}


def swallowed(model, ids, mask, length):
    """Trl 0.14.0's function, with a name that this model does not know: all rows come, zip and gather say nothing."""
    rows = model(ids, attention_mask=mask, **{other_keep_argument(model): length + 1}).logits[:, :-1]
    pairs = zip(rows, ids[:, -length:])
    return torch.stack([row.log_softmax(-1).gather(1, tokens[:, None])[:, 0] for row, tokens in pairs])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("function", [logits.completion_logps, score])
def test_right_functions_pass_on_every_model(name, function):
    found = logits.check_alignment(function, MODELS[name]())
    assert found.error <= found.tolerance < found.contrast


@pytest.mark.skipif("4.49" <= transformers.__version__[:4] < "4.52", reason="both names work in 4.49 to 4.51")
@pytest.mark.parametrize("name", MODELS)
def test_the_swallowed_name_is_found_on_every_model(name):
    with pytest.raises(logits.MisalignedLogProbs, match="scored at the first prompt positions") as caught:
        logits.check_alignment(swallowed, MODELS[name]())
    assert caught.value.error > 0.01 and "prompt" in caught.value.found


def under_autocast(dtype):
    """Return the small model as accelerate's mixed precision leaves it: 16 bits inside, logits of float32."""
    model = models.load("tiny")[0]
    own = model.forward

    def forward(*args, **options):
        with torch.autocast("cpu", dtype):
            output = own(*args, **options)
        output.logits = output.logits.float()
        return output

    model.forward = forward
    return model


def with_a_float32_head(model, ids, mask, length):
    """As trl 1.16 scores under `cast_lm_head_to_fp32`: the last layer alone is of float32, and rounds otherwise."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -length - 1 : -1]
    logps = model.get_output_embeddings()(hidden.float()).log_softmax(-1)
    return logps.gather(-1, ids[:, -length:, None])[..., 0]


def test_rounding_is_measured_and_not_told_from_the_dtype_of_the_logits():
    """Under autocast the logits are of float32, and are as far from the truth as 16 bits round."""
    model = under_autocast(torch.bfloat16)
    found = logits.check_alignment(with_a_float32_head, model)
    assert 1e-4 < found.error <= found.tolerance < found.contrast / 2
    assert not any(module._forward_hooks for module in model.modules())
    for shift in (1, -1):
        with pytest.raises(logits.MisalignedLogProbs):
            logits.check_alignment(functools.partial(score, shift=shift), model)
    assert logits.check_alignment(score, MODELS["trained"]()).tolerance < 1e-3


late = functools.partial(score, shift=1)
early = functools.partial(score, shift=-1)
warm = functools.partial(score, temperature=0.9)


def unmasked(model, ids, mask, length):
    return score(model, ids, None, length)


def raw(model, ids, mask, length):
    rows = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    return rows.gather(-1, ids[:, -length:, None])[..., 0]


def prompt_tokens(model, ids, mask, length):
    rows = model(input_ids=ids, attention_mask=mask).logits[:, :length].log_softmax(-1)
    return rows.gather(-1, ids[:, 1 : 1 + length, None])[..., 0]


def one_nan(*parts):
    return score(*parts).index_fill(1, torch.tensor(2), float("nan"))


@pytest.mark.parametrize(
    "function, match",
    [
        (late, "one position too late"),
        (early, "too early by 1"),
        (unmasked, "padding attended to"),
        (lambda *parts: score(*parts).exp(), "they equal probabilities"),
        (lambda *parts: -score(*parts), "negative log-probabilities"),
        (raw, "never normalised"),
        (prompt_tokens, "the first prompt tokens"),
        (lambda *parts: score(*parts) + 0.01, r"none of the mistakes.*0\.01 nats"),
        (one_nan, "4 of 32 scores are NaN or infinite"),
        (lambda *parts: score(*parts)[:, 1:], r"returned shape \(4, 7\) for a batch of 4 and 8"),
    ],
)
def test_the_error_says_where_the_scores_come_from(function, match):
    with pytest.raises(logits.MisalignedLogProbs, match=match):
        logits.check_alignment(function, MODELS["trained"]())


def test_what_is_known_to_both_is_no_mistake():
    """A temperature; padding that is not there (trl 0.14.0 passes no mask); dropout of a model in train mode."""
    model = random_model(initializer_range=0.2).train()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, _, out: nn.functional.dropout(out, 0.5, module.training))
    logits.check_alignment(score, model)
    assert all(module.training for module in model.modules())
    logits.check_alignment(unmasked, MODELS["trained"](), padded=False)
    logits.check_alignment(warm, MODELS["trained"](), temperature=0.9)
    with pytest.raises(logits.MisalignedLogProbs, match="at temperature 1, and not at the one asked for"):
        logits.check_alignment(score, MODELS["trained"](), temperature=0.9)
    model.lm_head.weight.data.zero_()  # every token is as likely everywhere, and a misaligned function would pass
    with pytest.raises(ValueError, match="the probe cannot decide"):
        logits.check_alignment(score, model)


def test_the_swallowed_name_is_heard_once_repaired():
    model, ids = random_model(), torch.arange(3, 9)[None]
    asked, every = {other_keep_argument(model): 2}, model(ids).logits
    with logits.repair(model):
        torch.testing.assert_close(model(ids, **asked).logits, every[:, -2:])
        assert model(ids, **{logits.keep_argument(model): 3}).logits.shape[1] == 3 and model(ids).logits.shape[1] == 6
    assert model(ids, **asked).logits.shape[1] == 6
    with pytest.raises(ValueError, match=r"Cut makes logits .* Next: score with"):
        logits.repair(cut_from_the_front(random_model()))
