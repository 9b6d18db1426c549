"""Placement: every tensor by name, the problems that are no single tensor's, device maps, and the guard."""

import dataclasses
import types

import pytest
import torch
import transformers
from small import lora
from torch import nn

from failurelab import guards, placement, simulate

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


def shape(**more):
    config = transformers.Qwen2Config(**SHAPE | {"num_hidden_layers": 2, "num_key_value_heads": 1} | more)
    return simulate.model(config, torch.float32)


def four_bit_linear(device="cuda:0"):
    linear = nn.Linear(64, 128, bias=False, device="meta")
    return simulate.place(simulate.four_bit(linear, compute_dtype=torch.float32), {"": device})


def test_a_model_at_home_is_local(model):
    report = placement.check(model, "cpu")
    assert report.local and report.first_to_fail == ""
    assert report.tensors["parameter"] == len(list(model.parameters()))
    assert not dataclasses.replace(report, problems=("the head is torn",)).local
    with pytest.raises(ValueError, match="'cuba:0' is no device"):
        placement.check(model, "cuba:0")


def test_every_tensor_elsewhere_is_named():
    model = simulate.place(shape(tie_word_embeddings=False), {"": 0, "model.layers.1.mlp": 1, "model.rotary_emb": 1})
    report = placement.check(model, "cuda:0")
    names = {each.name: (each.kind, each.device) for each in report.elsewhere}
    assert names["model.layers.1.mlp.up_proj.weight"] == ("parameter", "cuda:1")
    assert names["model.rotary_emb.inv_freq"] == ("buffer", "cuda:1")
    assert sum(kind == "parameter" for kind, _ in names.values()) == 3
    assert not report.local and "Next:" in str(report)


def test_adapter_weights_are_told_from_others(model):
    wrapped = lora(model, target_modules=["q_proj"])
    assert placement.check(wrapped, "cpu").tensors["adapter weight"] == 4
    name = next(name for name, _ in wrapped.named_modules() if name.endswith("layers.0.self_attn.q_proj.lora_B"))
    simulate.place(wrapped.get_submodule(name), {"": 1})
    report = placement.check(wrapped, "cpu")
    assert [(each.kind, each.device) for each in report.elsewhere] == [("adapter weight", "cuda:1")]
    assert report.first_to_fail.startswith(name)


def test_scales_on_another_device_are_found():
    """The state of nn.DataParallel's replica: bytes on one GPU, scales on another, and the weight has lost its own."""
    layer = four_bit_linear("cuda:0")
    replica = layer._replicate_for_data_parallel()
    with simulate.fake():
        replica.weight = nn.Parameter(torch.empty_like(layer.weight, device="cuda:1"), requires_grad=False)
    replica.bias = None
    report = placement.check(replica, "cuda:1")
    assert {each.name for each in report.elsewhere} == {"weight.quant_state.absmax", "weight.quant_state.code"}
    assert report.first_to_fail == "Linear4bit"
    replica.quant_state = None
    assert "lost their quantization state" in placement.check(replica, "cuda:1").problems[0]


def test_what_does_not_belong_together_is_named(model):
    assert model.config.tie_word_embeddings and placement.check(model, "cpu").problems == ()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    (problem,) = placement.check(model, "cpu").problems
    assert "lm_head" in problem and "model.embed_tokens" in problem and "trained apart" in problem


@pytest.mark.parametrize(("home", "known"), [("cuda:0", 1), ("cpu", 0)])
def test_offloaded_modules_are_named(home, known):
    """CPU offload of a device map is for inference: training is told, with the modules."""
    model = simulate.place(shape(), {"": 0})
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}
    problems = placement.check(model, home).problems
    assert len(problems) == known and all("model.layers.1, lm_head" in problem for problem in problems)


def test_several_visible_gpus_in_one_process_are_a_problem(monkeypatch):
    """nn.DataParallel is what a trainer makes of it; under a launcher, or without 4 bit, it is none."""
    layer = four_bit_linear()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    said = [each for each in placement.check(layer, "cuda:0", visible=2).problems if "DataParallel" in each]
    assert len(said) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not any("DataParallel" in each for each in placement.check(layer, "cuda:0", visible=2).problems)


def begin(guard, model, **args):
    args = types.SimpleNamespace(**{"bf16": False, "fp16": False, "device": torch.device("cpu")} | args)
    guard.on_train_begin(args, None, None, model=model)


def test_the_guard_stops_before_the_first_step(model):
    guard = guards.PlacementGuard()
    begin(guard, model)
    assert guard.report.local
    with pytest.raises(guards.GuardTripped, match=r"PlacementGuard: 2\d of 2\d tensors are not on cuda:0") as caught:
        begin(guards.PlacementGuard(), model, device=torch.device("cuda", 0))
    assert caught.value.report.first_to_fail == "model.embed_tokens"
    with pytest.warns(guards.GuardWarning, match="model.embed_tokens"):
        begin(guards.PlacementGuard("warn"), model, device=torch.device("cuda", 0))


def test_the_guard_leaves_a_split_model_to_its_hooks():
    """A map that splits a model on purpose, in one process, is no alarm, unless a layer is not served."""
    model = simulate.place(shape(tie_word_embeddings=False), {"": 0, "model.layers.1": 1})
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(guards.GuardTripped, match=r"first layer to fail: model\.layers\.1\.input_layernorm"):
        begin(guards.PlacementGuard(), model, device=torch.device("cuda", 0))
    model.get_submodule("model.layers.1")._hf_hook = types.SimpleNamespace(execution_device=1, offload=False)
    begin(guards.PlacementGuard(), model, device=torch.device("cuda", 0))
