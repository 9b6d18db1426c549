"""Rules are measured where they count: a layer that is computed again, a row that is made, a token after the end."""

import types

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from failurelab_course import eras
from failurelab_course.experiments import models
from failurelab_course.labs.checker import measure, scorer
from failurelab_course.labs.checker.base import Refused
from failurelab_course.labs.checker.kinds import logits, trainer

MODEL = str(eras.root() / "models" / "tiny-qwen2")


@pytest.fixture
def tiny():
    model, tokenizer = models.load(MODEL)
    return model.train(), tokenizer


def batch(tokenizer):
    """Two sums with their answers and ends, (2, 6); the completion is the last two tokens."""
    return tokenizer(["3+4=7<|im_end|>", "8+1=9<|im_end|>"], return_tensors="pt")


def rows(model, ids, **options):
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **options).logits


def states(model, ids, first=None, end=None):
    """Return what goes into the head, of some rows."""
    return model.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[:, first:end]


def head_on_flat_rows(model, ids):
    return model.lm_head(states(model, ids, -3, -1).flatten(0, 1)).unflatten(0, (2, 2))


# The rows that a script scores the completion by; how many are made for each sequence, how many needed, how far off.
WAYS = {
    "all": (lambda model, ids: rows(model, ids)[:, -3:-1], 6, 3, 0),
    "asked for": (lambda model, ids: rows(model, ids, logits_to_keep=3)[:, :-1], 3, 3, 0),
    "head on flat rows": (head_on_flat_rows, 2, 3, 0),
    "linear": (lambda model, ids: functional.linear(states(model, ids, -3, -1), model.lm_head.weight), 2, 3, 0),
    "by hand and cut": (lambda model, ids: (states(model, ids) @ model.lm_head.weight.T)[:, -3:-1], 6, 3, 0),
    "one late": (lambda model, ids: rows(model, ids, logits_to_keep=2), 2, 2, -1),
    "from the front": (lambda model, ids: rows(model, ids)[:, :2], 6, 6, 3),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_logits_are_read_where_they_are_multiplied(tiny, way):
    """However a script comes to its scores: rows that it cuts away count, and its own product with the head too."""
    scored, made, needed, off = WAYS[way]
    model, tokenizer = tiny
    head = logits._Head(model, types.SimpleNamespace(clean=models.load(MODEL)[0]))
    ids = batch(tokenizer)["input_ids"]
    with head.products:
        with torch.no_grad():
            model(input_ids=ids)  # generation, or the reference model
        scores = scored(model, ids).log_softmax(-1).gather(-1, ids[:, -2:, None])[..., 0]
        (scores * torch.tensor([[1.0], [-1.0]])).sum().backward()
    head.remove()
    assert head.metrics() == {"rows_made": made, "rows_needed": needed, "positions_off": off}
    assert not model.lm_head._forward_hooks


def test_kept_activations_are_counted_and_no_flag_is_asked(tiny):
    """Either kind of checkpointing, or one's own; and a flag that is set while the pass goes without it."""
    model, tokenizer = tiny
    ids = batch(tokenizer)["input_ids"]
    layers = model.model.layers

    def kept():
        listening = trainer.Kept(model)
        model.zero_grad()
        model(input_ids=ids, use_cache=False).logits.sum().backward()
        listening.remove()
        return listening.count()

    assert kept() == len(layers)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert kept() == 0
    assert model.is_gradient_checkpointing
    for layer in layers:  # the flag of the model is on, and no layer goes by it
        layer.gradient_checkpointing = False
    assert kept() == len(layers)
    for layer in layers:
        layer.forward = lambda *args, own=layer.forward, **kw: checkpoint(own, *args, use_reentrant=False, **kw)
    assert kept() == 0


def test_completions_that_go_on_after_their_end_are_seen(tiny):
    _, tokenizer = tiny
    prompt = tokenizer(["3+4="], return_tensors="pt")["input_ids"]
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    (seven,) = tokenizer.encode("7")
    written = [[seven, end, pad, pad], [seven, end, seven, pad], [seven, end, end, end], [seven] * 4]
    sequences = torch.cat([prompt.expand(4, -1), torch.tensor(written)], dim=1)
    model = types.SimpleNamespace(generate=lambda input_ids: sequences)
    scores = []
    with trainer.scored_rollouts(model, tokenizer, scores, lambda: 0, lambda ids: None):
        model.generate(prompt)
    assert [goes_on for *_, goes_on in scores] == [False, True, False, False]
    assert [right for _, _, right, _ in scores] == [1.0, 0.0, 1.0, 0.0]


def test_an_answer_may_claim_facts_and_figures():
    """Facts come before figures: they say what was so before the repair."""
    metrics = {"tensors_changed": 25, "warnings": 3, "refusal": ""}
    facts = {"tensors_changed": 1, "undone_by": "a_function"}

    def answered(**claims):
        found = dict(metrics)
        measure.answer(types.SimpleNamespace(ANSWER={"verdict": "broken"} | claims), found, facts)
        return found["answer"], found["answer_claims"], found["answer_wrong"]

    assert answered(tensors_changed=1, undone_by="A_function ", warnings=3) == ("broken", 3, 0)
    assert answered(tensors_changed=25, undone_by="another", warnings=None) == ("broken", 2, 2)
    for claims, problem in (
        ({"luck": 1}, "which is no figure"),
        ({"warnings": "three"}, "which is no number"),
        ({"undone_by": [1]}, "neither a number nor a text"),
    ):
        with pytest.raises(Refused, match=problem):
            answered(**claims)


def test_the_score_is_what_endless_draws_would_give(tiny):
    """In every length of prompt and answer, and the end counts: without it a right beginning would be right."""
    model, tokenizer = tiny
    prompts = [("3+4=", "7"), ("12+9=", "21"), ("8+1=", "9"), ("19+19=", "38")] * 25
    drawn = [models.accuracy(model, tokenizer, sampled=True, seed=seed, prompts=prompts) for seed in range(10)]
    with scorer.start(model.eval(), tokenizer) as score:
        assert score(prompts=prompts) == pytest.approx(sum(drawn) / 10, abs=0.03)
        assert score(prompts=[("12+9=", "2")]) < 0.1 < score(prompts=[("12+9=", "21")])


# A script's scoring function: what it scores by which row, its gradients, and what cannot be scored.

FUNCTION = """
from failurelab import logits


def log_probs(model, ids, mask, n):
    {body}
"""
RIGHT = "return logits.completion_logps(model, ids, mask, n)"


@pytest.fixture
def measured(tmp_path):
    def run(body):
        script = tmp_path / "train.py"
        script.write_text(FUNCTION.format(body=body))
        return measure.run(script, MODEL, tmp_path / "output", "log_probs", "log_probs")

    return run


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (RIGHT, {"positions_off": 0, "rows_made": 3, "scores_from": ""}),  # a row for each completion token
        ("return -" + RIGHT.removeprefix("return "), {"positions_off": None}),
        (RIGHT + ".detach()", {"positions_off": 0, "gradient_error": None}),
    ],
)
def test_a_scoring_function_is_compared_with_the_truth(measured, body, expected):
    """Right, of the other sign, without a graph; by the wrong row and without the mask: labs 08 and 16."""
    made = measured(body)
    assert (made.traceback, made.refused) == ("", "")
    found = made.metrics
    assert {name: found[name] for name in expected} == expected
    right = expected["positions_off"] == 0
    assert (found["log_prob_error"] < 1e-4) == right == (found["scores_from"] == "")
    if found["gradient_error"] is not None:
        assert (found["gradient_error"] < 1e-3) == right


def test_what_is_no_score_for_each_token_is_refused(measured):
    assert "not one number for each completion token: (6, 3)" in measured(RIGHT + ".mean()").refused
