"""Positive controls: what a judge would have seen if the failure had been there; and that nothing stays changed."""

import copy
import types

import pytest
import small
import torch

from failurelab import handles
from failurelab.preflight import repairs, undos
from failurelab.preflight.answers import Finding
from failurelab.preflight.inputs import Load, Seen
from failurelab.preflight.intercept import controls


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
        pytest.importorskip("peft")
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


def test_equal_tokens_show_no_shift():
    model = small.qwen2()
    ids = torch.arange(1, 9)[None].repeat(2, 1)
    assert controls.sees_shifted_scores(model, ids)
    assert not controls.sees_shifted_scores(model, torch.full_like(ids, 3))
    assert controls.count_all_rows(model, ids) == 8


def test_what_is_frozen_stays_frozen():
    """PEFT's disable_adapter switches requires_grad on when it is left."""
    pytest.importorskip("peft")
    model = small.lora(small.qwen2())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with handles.keep_requires_grad(model), model.disable_adapter():
        pass
    assert not any(parameter.requires_grad for parameter in model.parameters())


def reward(completions, answer):
    return [0.0 for _ in completions]


UNDOS = [
    ("F13", "Set tokenizer.eos_token = '<|im_end|>' before the trainer is made.", "", repairs.Statement),
    ("F11", "Set max_completion_length to what the answers need: 40 for the longest.", "", repairs.Arguments),
    ("F20", "Set steps_per_generation=4, the same as gradient_accumulation_steps.", "", repairs.Arguments),
    ("F14", "Add **kwargs to the function's arguments.", "", repairs.AnyKeywords),
    ("F14", "Give the pattern re.DOTALL.", "", repairs.DotAll),
    ("F14", 'Read the text of a completion as completion[0]["content"].', "", repairs.FirstLine),
    ("F14", "Call the dataset's column 'solution' (dataset.rename_column).", "with x under this name", repairs.Keyword),
    ("F14", "Return a finite number for every completion.", "", type(None)),
    ("F7", "trainer.generation_config.use_cache = False before training", "", type(None)),
]  # fmt: skip


@pytest.mark.parametrize(("failure", "repair", "tried", "kind"), UNDOS)
def test_what_a_judge_says_is_to_be_changed_can_be_tried(failure, repair, tried, kind):
    """A judge that names no undo says what to change in a sentence of its own; that becomes an object."""
    trainer = types.SimpleNamespace(reward_funcs=[reward], train_dataset=None)
    given = Seen(trainer, {"max_completion_length": 8, "steps_per_generation": 1})
    found = undos.with_undo(Finding(failure, "e", repair, tried=tried, about="reward"), given)
    assert type(found.undo) is kind and found.tried == tried
    own = Finding(failure, "e", repair, undo=repairs.Keyword("trainer", "x"))
    assert undos.with_undo(own, given) is own


def test_a_load_in_16_bits_is_undone_where_it_was_made():
    """By the script, by the trainer, and by a cast after it."""
    config = types.SimpleNamespace(_name_or_path="q", initializer_range=0.02)
    trainer = types.SimpleNamespace(model=types.SimpleNamespace(config=config))
    kinds = {}
    for name, options in (("script", {}), ("trainer", {"by_trainer": True}), ("cast", {"dtype": "float32"})):
        load = Load("q", {}, config, **({"by_trainer": False, "dtype": "bfloat16"} | options))
        given = Seen(trainer, {"learning_rate": 1e-6}, loads=[load])
        found = undos.with_undo(Finding("F9", "e", "Load the model with dtype=torch.float32."), given)
        kinds[name] = found.undo
        assert "100.0%" in found.tried or "99." in found.tried
    assert kinds["script"] == repairs.Keyword("load", "dtype", '"float32"', index=0)
    assert kinds["trainer"].values == {"model_init_kwargs": {"dtype": "float32"}}
    assert kinds["cast"].text == "{trainer}.model.float()"
