"""Positive controls: what a judge would have seen if the failure had been there; and that nothing stays changed."""

import copy
import types

import pytest
import small
import torch

from failurelab import handles
from failurelab.preflight.judges.logits import LogitsJudge
from failurelab.preflight.stage import controls


def state(model):
    """Return what a control might leave changed: gradients, modes, hooks."""
    return (
        [parameter.grad for parameter in model.parameters()],
        [module.training for module in model.modules()],
        [len(module._forward_hooks) for module in model.modules()],
    )


@pytest.mark.parametrize("adapted", [False, True])
def test_a_module_that_is_cut_off_is_counted(adapted):
    model = small.qwen2()
    if adapted:
        model = small.lora(model)
    model.train()
    before, random = state(model), torch.get_rng_state()
    assert controls.count_cut_off(model) > 0
    assert state(model) == before and torch.equal(torch.get_rng_state(), random)


def test_a_model_that_does_not_look_back_is_blind(model, tokenizer):
    """Without attention a token is predicted from the last one alone, so lost context cannot show."""
    prompts, seeing = ["12+7=", "3+4="], controls.error_without_context(model, tokenizer, ["12+7=", "3+4="], 4)
    blind = copy.deepcopy(model)
    with torch.no_grad():
        for layer in blind.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    blind.train()
    assert seeing > 1 and controls.error_without_context(blind, tokenizer, prompts, 4) < 0.01
    assert blind.training


def test_a_lost_causal_mask_is_a_mechanism_of_its_own(model, tokenizer):
    """Up to transformers 4.48 padded rows lose it; a model that does not look back shows nothing of it either."""
    prompts = ["12+7=", "3+4="]
    seeing = controls.error_without_causality(model, tokenizer, prompts, 4)
    blind = copy.deepcopy(model)
    with torch.no_grad():
        for layer in blind.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    assert seeing > 0.1 and controls.error_without_causality(blind, tokenizer, prompts, 4) < 0.01


def test_equal_tokens_show_no_shift():
    model = small.qwen2()
    ids = torch.arange(1, 9)[None].repeat(2, 1)
    assert controls.sees_shifted_scores(model, ids)
    assert not controls.sees_shifted_scores(model, torch.full_like(ids, 3))
    assert controls.count_all_rows(model, ids) == 8


def test_what_is_frozen_stays_frozen():
    """PEFT's disable_adapter switches requires_grad on when it is left."""
    model = small.lora(small.qwen2())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with handles.keep_requires_grad(model), model.disable_adapter():
        pass
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("made", "verdict"), [(12, "FOUND"), (5, "NOT CHECKED")], ids=["all rows", "last rows"])
def test_rows_that_a_layer_of_the_script_keeps_are_not_the_whole_sequence(made, verdict):
    """A head that is cut to as many rows as the longest completion needs makes more than shorter ones ask for."""
    trainer = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
    judge = LogitsJudge(types.SimpleNamespace(trainer=trainer, arguments={}))
    given = {"input_ids": torch.zeros(2, 12, dtype=torch.long), "logits_to_keep": 3}
    judge._note_rows(trainer.model, (), given, types.SimpleNamespace(logits=torch.zeros(2, made, 7)))
    finding = judge._judge_rows(None)
    assert (finding.failure, finding.verdict.value) == ("F3a", verdict)
