"""Missing gradients: found by measuring, repaired by one hook, in every era. And the warning that proves nothing."""

import copy
import functools
import inspect

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from failurelab import gradients
from failurelab.handles import Handle, HandleError, wrap_method
from failurelab_course.experiments.observe import count_warnings

WARNING = "None of the inputs have requires_grad=True"
installed = Version(transformers.__version__)


def small_model(seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )


def lora(model, **options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    )


def checkpoint(model, reentrant: bool) -> None:
    """Switch checkpointing on, and nothing else: transformers 5 sets the input hook along with it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=func)
    model.train()


def backward(model) -> None:
    ids = torch.arange(12).reshape(2, 6) % 32
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


# The three faces of the warning


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("repaired", [True, False])
def test_full_fine_tuning_learns_whatever_the_warning_says(reentrant, repaired):
    """The harmless face: generation warns, and all 26 tensors have a gradient."""
    model = small_model()
    checkpoint(model, reentrant)
    if repaired:
        gradients.require_input_grads(model)
    with count_warnings(WARNING) as seen:
        with torch.no_grad():
            model(input_ids=torch.arange(6)[None])
        backward(model)
    report = gradients.gradient_report(model)
    assert report.learns and len(report.trainable) == 26 and not report.without_gradient
    assert (seen.count > 0) == reentrant  # with the repair, too: the warning is no measure


def test_frozen_embeddings_train_the_last_norm_only():
    """The silent face: 24 of 25 trainable tensors have no gradient, and nothing is raised."""
    model = small_model()
    model.get_input_embeddings().requires_grad_(False)
    checkpoint(model, reentrant=True)
    with count_warnings(WARNING) as seen:
        backward(model)
    report = gradients.gradient_report(model)
    assert seen.count > 0
    assert not report.learns
    assert (len(report.trainable), len(report.without_gradient)) == (25, 24)
    assert set(report.trainable) - set(report.without_gradient) == {"model.norm.weight"}
    text = str(report)
    assert text.startswith("24 of 25 trainable tensors have no gradient: model.layers.0.self_attn.q_proj.weight")
    assert "and 21 more" in text and "require_input_grads" in text and "use_reentrant" in text


def test_lora_ends_in_an_error():
    """The fatal face: nothing trainable lies behind the last layer, so the loss has no graph."""
    model = lora(small_model())
    checkpoint(model, reentrant=True)
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        backward(model)
    with pytest.raises(gradients.GradientError, match="no backward pass has run yet"):
        gradients.gradient_report(model)


def test_silencing_the_warning_is_no_repair():
    """The popular wrong fix: a filter. The parameters are as dead as before."""
    model = small_model()
    model.get_input_embeddings().requires_grad_(False)
    checkpoint(model, reentrant=True)
    with pytest.warns(UserWarning, match=WARNING):
        backward(model)
    assert len(gradients.gradient_report(model).without_gradient) == 24


@pytest.mark.parametrize("when", ["before the wrap", "after the wrap"])
def test_the_repair_heals_lora(when):
    """Every adapter tensor has a gradient; those of A are zero at the start, which is no fault."""
    model = small_model()
    handle = gradients.require_input_grads(model) if when == "before the wrap" else None
    model = lora(model)
    handle = handle or gradients.require_input_grads(model)
    checkpoint(model, reentrant=True)
    backward(model)
    report = gradients.gradient_report(model)
    assert report.learns and len(report.trainable) == 8
    assert len(report.zero_gradient) == 4 and all("lora_A" in name for name in report.zero_gradient)
    assert "all 8 trainable tensors have a gradient" in str(report) and "All zero in 4" in str(report)
    handle.remove()


def test_the_repair_heals_frozen_embeddings_and_keeps_the_numbers():
    """With the hook, reentrant gradients equal those without checkpointing."""
    expected = {}
    for kind in ("off", "repaired"):
        model = small_model()
        model.get_input_embeddings().requires_grad_(False)
        if kind == "repaired":
            checkpoint(model, reentrant=True)
            gradients.require_input_grads(model)
        model.train()
        backward(model)
        found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        expected = expected or found
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])
    assert len(found) == 25


def test_a_report_names_another_cause_where_checkpointing_is_off():
    """Advice on checkpointing is given only where checkpointing cuts."""
    model = small_model()
    extra = torch.nn.Linear(2, 2)
    model.add_module("unused", extra)
    backward(model)
    report = gradients.gradient_report(model)
    assert report.without_gradient == ("unused.weight", "unused.bias")
    assert "detaches" in str(report) and "require_input_grads" not in str(report)


# The handle


def hooks(model) -> int:
    return len(model.get_input_embeddings()._forward_hooks)


def test_the_repair_is_idempotent_also_through_the_peft_wrapper():
    """One hook, however often it is asked for; it goes with the last handle."""
    model = small_model()
    first = gradients.require_input_grads(model)
    wrapped = lora(model)
    second = gradients.require_input_grads(wrapped)
    assert hooks(model) == hooks(wrapped) == 1
    first.remove()
    assert hooks(model) == 1
    second.remove()
    assert hooks(model) == 0


def test_a_handle_removed_twice_is_an_error_that_says_what_to_do():
    """Two owners of one change are a mistake that shows later; so it shows now."""
    handle = gradients.require_input_grads(small_model())
    handle.remove()
    with pytest.raises(HandleError, match=r"removed already.*Next: remove a handle in one place only"):
        handle.remove()


def test_a_handle_is_a_context_manager_and_may_be_removed_inside():
    model = small_model()
    with gradients.require_input_grads(model) as handle:
        assert handle.active and hooks(model) == 1
        handle.remove()
    assert not handle.active and hooks(model) == 0


def test_the_repair_and_transformers_own_hook_leave_each_other_alone():
    """`enable_input_require_grads` before and after, and switched off again."""
    model = small_model()
    model.enable_input_require_grads()
    handle = gradients.require_input_grads(model)
    assert hooks(model) == 2
    model.disable_input_require_grads()
    assert hooks(model) == 1
    model.enable_input_require_grads()
    handle.remove()
    assert hooks(model) == 1
    model.disable_input_require_grads()
    assert hooks(model) == 0


def test_passes_without_gradients_are_left_alone():
    """Under no_grad and inference_mode the embeddings' output stays as it is."""
    model = small_model()
    gradients.require_input_grads(model)
    model.get_input_embeddings().requires_grad_(False)
    ids = torch.arange(4)[None]
    with torch.no_grad():
        assert not model.get_input_embeddings()(ids).requires_grad
    with torch.inference_mode():
        assert not model.get_input_embeddings()(ids).requires_grad
    assert model.get_input_embeddings()(ids).requires_grad


def test_a_copied_model_keeps_the_repair_and_can_lose_it_alone():
    """A trainer copies the policy for a reference model: the copy's hook belongs to no handle of the original."""
    model = small_model()
    handle = gradients.require_input_grads(model)
    twin = copy.deepcopy(model)
    gradients.require_input_grads(twin).remove()
    assert (hooks(model), hooks(twin)) == (1, 0)
    handle.remove()
    assert hooks(model) == 0


def test_a_wrapper_of_data_parallel_kind_is_looked_through():
    model = small_model()
    wrapper = torch.nn.Sequential()
    wrapper.module = model
    gradients.require_input_grads(wrapper)
    assert hooks(model) == 1


def test_a_model_without_input_embeddings_is_an_error():
    with pytest.raises(gradients.GradientError, match=r"Linear has no input embeddings.*use_reentrant"):
        gradients.require_input_grads(torch.nn.Linear(2, 2))


def test_four_bit_models_are_repaired():
    """The weights of the layers are frozen 4-bit numbers; the adapters behind the hook learn."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    if installed < Version("5"):
        pytest.skip("this transformers loads 4-bit models on a GPU only")
    from transformers import BitsAndBytesConfig

    from failurelab_course.experiments import models

    model = transformers.AutoModelForCausalLM.from_pretrained(
        models.path("tiny"), quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"}
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    checkpoint(model, reentrant=True)
    ids = torch.arange(6)[None]
    with pytest.raises(RuntimeError, match="element 0"):
        model(input_ids=ids, labels=ids).loss.backward()
    with gradients.require_input_grads(model):
        model(input_ids=ids, labels=ids).loss.backward()
        assert gradients.gradient_report(model).learns


# Asked at the wrong time, or of the wrong model


def test_a_report_before_any_backward_pass_is_an_error():
    with pytest.raises(gradients.GradientError, match=r"none of the 26.*no backward pass.*Next: loss.backward\(\)"):
        gradients.gradient_report(small_model())


def test_a_report_after_zero_grad_is_an_error_and_not_an_alarm():
    model = small_model()
    backward(model)
    model.zero_grad()
    with pytest.raises(gradients.GradientError, match="zero_grad"):
        gradients.gradient_report(model)


@pytest.mark.parametrize("ask", [gradients.gradient_report, gradients.watch, gradients.snapshot])
def test_a_model_with_nothing_trainable_is_an_error(ask):
    with pytest.raises(gradients.GradientError, match=r"nothing is trainable in this Qwen2ForCausalLM: all 26.*Next"):
        ask(small_model().requires_grad_(False))


def test_partitioned_parameters_are_named_as_such():
    """ZeRO-3 keeps gradients elsewhere: an empty .grad there is no failure."""
    model = small_model()
    model.model.norm.weight.ds_id = 0
    with pytest.raises(gradients.GradientError, match=r"ZeRO-3.*Next.*watch"):
        gradients.gradient_report(model)


# Watching and comparing


def test_a_watch_survives_zero_grad_and_counts_over_steps():
    """What a trainer has set to None since is still known."""
    model = small_model()
    with gradients.watch(model) as watched:
        assert not watched.heard
        backward(model)
        model.zero_grad()
    assert watched.heard and watched.report().learns
    backward(model)  # no longer listened to
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_watch_may_say_that_nothing_got_a_gradient():
    model = small_model()
    with gradients.watch(model) as watched:
        pass
    assert len(watched.report().without_gradient) == 26 and not watched.report().learns


def test_watch_and_report_agree_on_the_silent_face():
    model = small_model()
    model.get_input_embeddings().requires_grad_(False)
    checkpoint(model, reentrant=True)
    with gradients.watch(model) as watched:
        backward(model)
    assert watched.report() == gradients.gradient_report(model)


def test_a_snapshot_names_what_changed():
    model = small_model()
    model.get_input_embeddings().requires_grad_(False)
    checkpoint(model, reentrant=True)
    before = gradients.snapshot(model)
    assert len(before) == 25 and before.changed(model) == []
    backward(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert before.changed(model) == ["model.norm.weight"]
    with pytest.raises(gradients.GradientError, match="wrapped since"):
        before.changed(lora(model))


@settings(max_examples=15, deadline=None)
@given(frozen=st.sets(st.integers(0, 25)), reentrant=st.booleans(), repaired=st.booleans())
def test_a_report_says_what_an_optimizer_step_then_does(frozen, reentrant, repaired):
    """Whatever is frozen: a tensor without a gradient does not move, and one with a gradient that is not zero does."""
    model = small_model()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index not in frozen)
    checkpoint(model, reentrant)
    if repaired:
        gradients.require_input_grads(model)
    if len(frozen) == 26:
        with pytest.raises(gradients.GradientError, match=r"nothing is trainable"):
            gradients.watch(model)
        return
    before = gradients.snapshot(model)
    with gradients.watch(model) as watched:
        try:
            backward(model)
        except RuntimeError as error:
            assert "element 0" in str(error) and reentrant and not repaired
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    report = watched.report()
    assert set(before.changed(model)) == set(report.trainable) - {*report.without_gradient, *report.zero_gradient}
    assert report.learns or (reentrant and not repaired)


# Wrapped methods


class Thing:
    def __init__(self, name):
        self.name = name

    def say(self, word):
        return f"{self.name}:{word}"


def shout(method, *args, **kwargs):
    return method(*args, **kwargs) + "!"


def ask(method, *args, **kwargs):
    return method(*args, **kwargs) + "?"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_wraps_are_removed_in_any_order(order):
    thing = Thing("a")
    handles = [wrap_method(thing, "say", shout, "shout"), wrap_method(thing, "say", ask, "ask")]
    assert thing.say("hi") == "a:hi!?"
    handles[order[0]].remove()
    assert thing.say("hi") == ("a:hi?" if order[0] == 0 else "a:hi!")
    handles[order[1]].remove()
    assert thing.say("hi") == "a:hi"


def test_a_wrap_of_a_copy_calls_the_copy():
    """A reference model is a deep copy of the policy: it must not generate with the policy's weights."""
    thing = Thing("a")
    handle = wrap_method(thing, "say", shout, "shout")
    twin = copy.deepcopy(thing)
    twin.name = "b"
    assert twin.say("hi") == "b:hi!"
    handle.remove()
    assert twin.say("hi") == "b:hi" and "say" not in vars(thing)


def test_two_wraps_of_a_copy_call_the_copy():
    thing = Thing("a")
    wrap_method(thing, "say", shout, "shout")
    wrap_method(thing, "say", ask, "ask")
    twin = copy.deepcopy(thing)
    twin.name = "b"
    assert twin.say("hi") == "b:hi!?" and thing.say("hi") == "a:hi!?"


def test_a_wrap_shows_the_signature_of_what_it_wraps():
    """`generate` reads what a forward takes; a wrap that hides it made logits of the whole prompt."""
    thing = Thing("a")
    as_it_was = inspect.signature(thing.say)
    wrap_method(thing, "say", shout, "shout")
    wrap_method(thing, "say", ask, "ask")
    assert inspect.signature(thing.say) == as_it_was
    assert inspect.signature(copy.deepcopy(thing).say) == as_it_was


def test_a_wrap_of_what_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="Thing has no method sing: a song needs one"):
        wrap_method(Thing("a"), "sing", shout, "a song")


def test_a_handle_shows_its_state():
    handle = Handle("a change", lambda: None)
    assert repr(handle) == "<a change: active>"
    handle.remove()
    assert repr(handle) == "<a change: removed>"
