"""The PEFT path, whole: whatever the model was before, the new adapter learns; a refusal leaves the model as it was."""

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from small import alternate, checkpoint, lora, lora_config, qwen2, stir

from failurelab import _checkpointing, adapters, gradients, guards, rollouts
from failurelab._unwrap import has_adapter
from failurelab.handles import keep_modes
from failurelab_course.experiments import models, trainers

installed = Version(transformers.__version__)
IDS = torch.tensor([[21, 22, 23, 24, 25, 26]])


def with_adapter(model, **options):
    """Put an adapter on that adds something, as a finished training leaves it."""
    return stir(peft.get_peft_model(model, lora_config(**options)), "lora_", 0.1).eval()


def logits(model):
    with torch.no_grad(), keep_modes(model):
        return model.eval()(input_ids=IDS, use_cache=False).logits


def backward(model):
    with gradients.watch(model.train()) as watched:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return watched.report()


def state(model):
    names = ("training", "gradient_checkpointing")
    return [
        (name, type(module), len(module._forward_hooks), *(getattr(module, each, None) for each in names))
        for name, module in model.named_modules()
    ] + [
        (name, id(p), p.requires_grad, p.detach().clone().flatten().tolist()[:50])
        for name, p in model.named_parameters()
    ]


@pytest.mark.parametrize(
    ("before", "reentrant"),
    [
        ("plain", None),
        ("switched off", None),
        ("one adapter", True),
        ("two adapters", True),
        ("saved", False),
    ],
)
def test_the_new_adapter_learns_and_the_function_stays(model, before, reentrant):
    """In every state the model may come in, and whether checkpointing is asked for here or switched on later."""
    if before != "plain":
        model = with_adapter(model, **({"modules_to_save": ["lm_head"]} if before == "saved" else {}))
    if before == "two adapters":
        model.add_adapter("second", lora_config(target_modules=["k_proj"]))
        model.set_adapter("second")
        stir(model, "second", 0.1)
    if before == "switched off":  # dropped
        model.base_model.disable_adapter_layers()
    expected = logits(model)
    asked = None if reentrant is None else {"use_reentrant": reentrant}
    config = lora_config()
    prepared = gradients.prepare_peft(model, config, asked)
    assert config.base_model_name_or_path is None  # PEFT writes it; then another model would be refused
    torch.testing.assert_close(logits(prepared), expected, atol=2e-4, rtol=1e-4)
    kinds = [kind for kind, _ in gradients.checkpointed(prepared)]
    if asked is None:
        assert not kinds
        checkpoint(prepared, reentrant=True)  # the order that ends in "element 0" without the hook
    else:
        assert set(kinds) == {"reentrant" if reentrant else "non-reentrant"}
    report = backward(prepared)
    assert report.learns and len(report.trainable) == 8
    assert sum("lora_" in name for name, _ in prepared.named_parameters()) == 8  # of the old adapters nothing is left


def test_a_trainer_trains_it(model, tokenizer):
    """GRPOTrainer gets the result without a peft_config; its own checkpointing comes after the wrap."""
    prepared = gradients.prepare_peft(with_adapter(model), lora_config())
    guard = guards.GradientGuard()
    trainer = trainers.grpo(
        prepared,
        tokenizer,
        steps=2,
        prompts_per_step=2,
        num_generations=2,
        reward=alternate,
        callbacks=[guard],
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
    )
    before = gradients.snapshot(trainer.model)
    trainer.train()
    assert guard.report.learns and len(before.changed(trainer.model)) == len(before) == 8


def four_bit(**options):
    pytest.importorskip("bitsandbytes")
    if Version("5") > installed:
        pytest.skip("this transformers loads 4-bit models on a GPU only")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        models.path("tiny"), quantization_config=config, device_map={"": "cpu"}, **options
    )


@pytest.fixture
def packing(monkeypatch):
    """Let bitsandbytes take this processor for one with AVX512-BF16, where it packs 4-bit weights, or for one without.

    Packing is a rearrangement that any processor can do; only the product with packed weights needs such a one.
    """
    modules = pytest.importorskip("bitsandbytes.nn.modules")

    def set_to(packs):
        monkeypatch.setattr(modules, "has_avx512bf16", lambda: packs, raising=False)

    return set_to


@pytest.mark.parametrize(("packs", "reentrant"), [(True, True), (False, False)])
def test_a_four_bit_model_learns_also_after_an_evaluation(reentrant, packs, packing):
    """In eval mode bitsandbytes packs the weights of some processors for inference, and gradients end there."""
    packing(packs)
    model = four_bit().train()
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
    prepared = gradients.prepare_peft(model, lora_config(), {"use_reentrant": reentrant})
    torch.testing.assert_close(logits(prepared), expected, atol=1e-3, rtol=1e-3)
    report = backward(prepared)
    assert report.learns and all("lora_" in name for name in report.trainable)
    assert len(report.zero_gradient) == 4  # A only
    torch.testing.assert_close(logits(prepared), expected, atol=1e-3, rtol=1e-3)


def test_packed_four_bit_weights_are_refused(packing):
    """The evaluation came first: no gradient passes these weights any more, and their scales are rounded."""
    packing(True)
    model = four_bit()
    logits(model)
    assert model.model.layers[0].self_attn.q_proj.weight.quant_state.packing_format_for_cpu
    with pytest.raises(
        adapters.AdapterError, match=r"of model.layers.0.self_attn.q_proj are packed.*load the model anew"
    ):
        gradients.prepare_peft(model, lora_config())


def test_safe_generation_leaves_four_bit_weights_trainable(packing, tokenizer):
    """Generation between two steps, as every trainer of rollouts does it."""
    packing(True)
    model = peft.get_peft_model(four_bit(), lora_config())
    model.train()
    with rollouts.safe_generation(model):
        model.generate(input_ids=IDS, max_new_tokens=2)
    assert rollouts.check(model, tokenizer, ["3+4=", "12+5="], max_new_tokens=2, use_cache=False).agrees
    states = [weight.quant_state for weight in model.parameters() if hasattr(weight, "quant_state")]
    assert states and not any(getattr(state, "packing_format_for_cpu", False) for state in states)
    assert len(backward(model).zero_gradient) == 4


def test_merging_into_four_bit_weights_warns_that_they_are_rounded():
    """It cannot be exact, so it is said. What is not quantized is kept in float32, as k-bit training wants it."""
    prepared = gradients.prepare_peft(four_bit(dtype=torch.bfloat16), lora_config())
    assert {p.dtype for p in prepared.parameters() if p.is_floating_point()} == {torch.float32}  # norms, embeddings
    model = with_adapter(four_bit())
    with torch.no_grad():
        expected = model.train()(input_ids=IDS, use_cache=False).logits
    with pytest.warns(UserWarning, match="rounds them anew"):
        prepared = gradients.prepare_peft(model, lora_config())
    assert len(backward(prepared).zero_gradient) == 4
    assert not torch.allclose(logits(prepared), expected, atol=1e-3)


def twice(model):
    return peft.PeftModelForCausalLM(with_adapter(model), lora_config(target_modules=["k_proj"]))


def without_wrapper(model):
    return with_adapter(model).base_model.model


def begun(model):
    model = with_adapter(model)
    backward(model)
    return model


def prepared(model):
    """After training gradients are gone; what is left is the mark of accelerate."""
    model._is_accelerate_prepared = True
    return model


def prompt_tuned(model):
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


@pytest.mark.parametrize(
    "made, config, message",
    [
        (twice, lora_config(), "wrapped twice"),
        (without_wrapper, lora_config(), "no PEFT wrapper"),
        (begun, lora_config(), "training of this model has begun"),
        (prepared, lora_config(), "a trainer has prepared it"),
        (prompt_tuned, lora_config(), "cannot be merged: PROMPT_TUNING"),
        (with_adapter, {"r": 4}, "peft_config is a dict"),
    ],
)
def test_what_cannot_work_is_refused_and_the_model_is_as_it_was(model, made, config, message):
    model = made(model)
    before, expected = state(model), logits(model)
    random_state = torch.get_rng_state()
    with pytest.raises(adapters.AdapterError, match=message):
        gradients.prepare_peft(model, config, {"use_reentrant": True})
    assert state(model) == before
    assert torch.equal(logits(model), expected) and torch.equal(torch.get_rng_state(), random_state)


def test_checkpointing_has_the_name_of_this_release(model, recwarn):
    """Transformers 5.23 warns of the older name, and v6 will not have it; the config's option goes with the method."""
    wrapped = gradients.prepare_peft(model, lora_config(), {"use_reentrant": False})
    assert {kind for kind, _ in gradients.checkpointed(wrapped)} == {"non-reentrant"}
    gradients.enable_checkpointing(wrapped, {"use_reentrant": True})
    assert {kind for kind, _ in gradients.checkpointed(wrapped)} == {"reentrant"}
    assert not [each for each in recwarn if "checkpointing_enable` is deprecated" in str(each.message)]
    assert hasattr(model, f"{_checkpointing.option_name()}_enable")


@pytest.mark.parametrize(("adapt", "adapted"), [(lora, True), (lambda model: lora(model).unload(), False)])
def test_a_model_has_an_adapter_until_it_is_taken_off(adapt, adapted):
    """Some releases of PEFT leave `peft_config` on what is left."""
    model = adapt(qwen2())
    model.peft_config = getattr(model, "peft_config", {"default": None})
    assert has_adapter(model) is adapted
