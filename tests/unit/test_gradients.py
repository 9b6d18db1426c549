"""Missing gradients: found by measuring, repaired by one hook, in every era."""

import asyncio
import copy
import functools
import importlib.metadata
import importlib.util
import inspect
import types
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import checkpoint, lora, qwen2

from failurelab import gradients, guards
from failurelab._checkpointing import option_name
from failurelab.handles import HandleError, listen_to, wrap_method


@pytest.fixture
def model():
    return qwen2()


@pytest.fixture
def cut_off(model):
    """A model whose embeddings are frozen, under reentrant checkpointing: its layers get no gradient."""
    model.get_input_embeddings().requires_grad_(False)
    checkpoint(model, reentrant=True)
    return model.train()


def backward(model) -> gradients.GradientReport:
    ids = torch.arange(12).reshape(2, 6) % 32
    with gradients.watch(model.train()) as watched:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return watched.report()


@pytest.mark.parametrize(("trl", "lasts"), [("0.21.0", True), ("0.22.2", False), ("0.27.0", True)])
def test_frozen_embeddings_train_the_last_norm_only(cut_off, monkeypatch, trl, lasts):
    """The silent face, and what heals in a release: from 0.22 to 0.25 trl loses the arguments at a generation."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: trl if name == "trl" else version(name))
    report = backward(cut_off)
    assert (len(report.trainable), len(report.without_gradient), report.learns) == (25, 24, False)
    assert set(report.trainable) - set(report.without_gradient) == {"model.norm.weight"}
    assert "require_input_grads" in str(report) and (f"or {option_name()}_kwargs" in str(report)) is lasts


def copies(parameters):
    """Return other tensors with the same numbers, as DeepSpeed's optimizer holds them."""
    return [torch.nn.Parameter(each.detach().clone()) for each in parameters]


class WritesBack(torch.optim.AdamW):
    """An optimizer of nobody's that may step copies, by one of torch's too."""

    optimizer = torch.optim.SGD([torch.zeros(1)])


@pytest.mark.parametrize(
    ("held", "kind", "left_out"),
    [
        (list, torch.optim.AdamW, 0),
        (lambda each: each[:-2], torch.optim.AdamW, 2),
        (lambda _: [], torch.optim.AdamW, 26),
        (copies, WritesBack, 0),
        (copies, torch.optim.AdamW, 26),  # which was made for another model, and was held
    ],
)
def test_what_an_optimizer_does_not_hold_is_named(model, held, kind, left_out):
    tensors = held(list(model.parameters()))
    optimizer = kind(tensors or [torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0]["params"] = tensors
    names = gradients.not_optimized(model, optimizer)
    assert len(names) == left_out and set(names) <= {name for name, _ in model.named_parameters()}
    report = gradients.GradientReport(tuple(dict(model.named_parameters())), (), (), not_optimized=names)
    assert report.learns is (left_out == 0) and not gradients.GradientReport((), (), ()).learns


def test_the_repair_heals_lora(model):
    """Every adapter tensor has a gradient; those of A are zero at the start, which is no fault."""
    gradients.require_input_grads(model)
    model = lora(model)
    checkpoint(model, reentrant=True)
    report = backward(model)
    assert report.learns and len(report.trainable) == 8
    assert len(report.zero_gradient) == 4 and all("lora_A" in name for name in report.zero_gradient)


def test_the_repair_heals_frozen_embeddings_and_keeps_the_numbers(cut_off):
    plain = qwen2()
    plain.get_input_embeddings().requires_grad_(False)
    gradients.require_input_grads(cut_off)
    found = []
    for model in (plain, cut_off):
        backward(model)
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert len(found[0]) == 25
    torch.testing.assert_close(*found)


def hooks(model) -> int:
    return len(model.get_input_embeddings()._forward_hooks)


def test_the_repair_is_idempotent_also_through_the_peft_wrapper(model):
    """One hook, however often it is asked for; it goes with the last handle. A copy's belongs to no handle."""
    first = gradients.require_input_grads(model)
    twin = copy.deepcopy(model)  # a trainer copies the policy for a reference model
    gradients.require_input_grads(twin).remove()
    assert (hooks(model), hooks(twin)) == (1, 0)
    wrapped = torch.nn.Sequential()
    wrapped.module = lora(model)  # as nn.DataParallel holds it
    second = gradients.require_input_grads(wrapped)
    assert hooks(model) == 1
    first.remove()
    assert hooks(model) == 1
    second.remove()
    assert hooks(model) == 0


def test_a_handle_is_removed_once_by_hand_or_at_the_end_of_a_block(model):
    """Removed inside the block, it is not removed again. Two owners are a mistake that shows later; so it shows now."""
    with gradients.require_input_grads(model) as handle:
        assert handle.active and hooks(model) == 1
        handle.remove()
    assert not handle.active and hooks(model) == 0
    with pytest.raises(HandleError, match="removed already"):
        handle.remove()


def test_passes_without_gradients_are_left_alone(cut_off):
    gradients.require_input_grads(cut_off)
    embeddings, ids = cut_off.get_input_embeddings(), torch.arange(4)[None]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not embeddings(ids).requires_grad
    assert embeddings(ids).requires_grad


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (gradients.watch, "nothing is trainable in this Qwen2ForCausalLM: all 26"),
        (gradients.snapshot, "nothing is trainable"),
        (lambda _: gradients.require_input_grads(torch.nn.Linear(2, 2)), "Linear has no input embeddings"),
    ],
)
def test_a_question_without_an_answer_is_an_error(model, ask, message):
    with pytest.raises(gradients.GradientError, match=message):
        ask(model.requires_grad_(False))


def test_a_watch_survives_zero_grad_and_may_say_that_nothing_got_a_gradient(model):
    """What a trainer has set to None since is still known; after the block nothing is listened to."""
    with gradients.watch(model) as watched:
        assert not watched.report().learns
        assert len(watched.report().without_gradient) == 26
        backward(model)
        model.zero_grad()
    assert watched.report().learns
    backward(model)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_snapshot_of_another_model_is_an_error(model):
    before = gradients.snapshot(model)
    with pytest.raises(gradients.GradientError, match="wrapped since"):
        before.changed(lora(model))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(frozen=st.sets(st.integers(0, 25)), reentrant=st.booleans(), repaired=st.booleans())
def test_a_report_says_what_an_optimizer_step_then_does(frozen, reentrant, repaired):
    """Whatever is frozen: a tensor without a gradient does not move, and one with a gradient that is not zero does."""
    model = qwen2()
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


class Thing:
    def __init__(self, name):
        self.name = name

    def say(self, word):
        return f"{self.name}:{word}"


class Around:
    """Asks what it wraps for what it has not, as wrappers of models do."""

    def __init__(self, thing):
        self.thing = thing

    def __getattr__(self, name):
        if name.startswith("__") or name == "thing":
            raise AttributeError(name)
        return getattr(self.thing, name)


def of_class(held):
    return type("Replaced", (Thing,), {"say": held})("a")


def with_own(make):
    """Return a thing whose own attribute takes the place of its method."""
    thing = Thing("a")
    thing.say = make(thing)
    return thing


def shout(method, *args, **kwargs):
    return method(*args, **kwargs) + "!"


def test_a_listener_that_went_hears_nothing_below_another_one():
    """Callbacks end in the order in which they began."""
    heard, functions = [], [Thing("a").say, Thing]
    own = list(functions)
    first, second = (
        listen_to(functions, lambda *told, name=name: heard.append((name, told[-1]))) for name in ("first", "second")
    )
    assert [function.__name__ for function in functions] == ["say", "Thing"]
    first.remove()
    assert functions[0]("hi") == "a:hi" and heard == [("second", "a:hi")]
    second.remove()
    assert functions[0]("hi") == "a:hi" and len(heard) == 1 and functions != own


@pytest.mark.parametrize(
    ("make", "answer", "of_copy"),
    [
        (lambda: Thing("a"), "a:hi", "b:hi"),
        (lambda: with_own(lambda thing: functools.partial(thing.say)), "a:hi", None),  # it has no `__self__`
        (lambda: with_own(lambda thing: Thing("other").say), "other:hi", "other:hi"),
        (lambda: of_class(mock.Mock(side_effect=lambda word: f"mock:{word}")), "mock:hi", "mock:hi"),
        (lambda: of_class(staticmethod(lambda word: f"static:{word}")), "static:hi", "static:hi"),
        (lambda: of_class(classmethod(lambda cls, word: f"{cls.__name__}:{word}")), "Replaced:hi", "Replaced:hi"),
        (lambda: Around(Thing("a")), "a:hi", "a:hi"),
    ],
    ids=["method", "own partial", "another's", "mock", "static", "class", "wrapper"],
)
def test_a_wrap_calls_what_python_would_and_of_a_copy_the_copy_s(make, answer, of_copy):
    """A reference model is a deep copy of the policy; a Mock in place of `generate` is given no model."""
    thing, owners = make(), []

    def note(method, *args, **kwargs):
        owners.append(method.__self__)
        return method(*args, **kwargs)

    as_it_was = inspect.signature(thing.say)
    handles = [wrap_method(thing, "say", shout, "shout"), wrap_method(thing, "say", note, "note")]
    twin = copy.deepcopy(thing)
    twin.name = "b"
    assert thing.say("hi") == f"{answer}!" and of_copy in (None, twin.say("hi").removesuffix("!"))
    assert owners[0] is thing and all(owner is twin for owner in owners[1:])
    assert inspect.signature(thing.say) == as_it_was  # `generate` reads there what a forward takes
    handles[0].remove()  # in any order
    assert thing.say("hi") == answer
    handles[1].remove()
    assert thing.say("hi") == answer and owners.count(thing) == 2
    with pytest.raises(AttributeError, match="has no method sing: a song needs one"):
        wrap_method(thing, "sing", shout, "a song")


@pytest.mark.parametrize("result", [iter, tuple, torch.tensor])
@pytest.mark.parametrize("kind", ["function", "awaited", "awaited object"])
def test_a_listener_takes_nothing_of_what_the_caller_is_given(result, kind):
    """A generator that was read by a listener arrived empty at the trainer; two guards may listen."""

    async def awaited(values):
        return result(values)

    class Awaited:
        __call__ = staticmethod(awaited)

    kinds = {"function": result, "awaited": awaited, "awaited object": functools.partial(Awaited())}
    heard, functions = [], [kinds[kind]]
    for _ in range(2):
        listen_to(functions, lambda *told: heard.append(list(told[-1])))
    assert inspect.iscoroutinefunction(functions[0]) is (kind != "function")  # the trainer asks
    answer = functions[0]([1.0, 2.0])
    answer = answer if kind == "function" else asyncio.run(answer)
    assert list(answer) == [1.0, 2.0] and heard == [[1.0, 2.0]] * 2


def test_an_object_that_is_listened_to_keeps_its_methods_and_its_attributes():
    class Curriculum:
        level = 0

        def __call__(self, completions):
            return [float(self.level)] * len(completions)

        def move_to(self, level):
            self.level = level

    own, heard = Curriculum(), []
    functions = [own]
    listen_to(functions, lambda *told: heard.append(told[-1]))
    functions[0].move_to(1)
    assert functions[0](["a"]) == [1.0]
    functions[0].level = 2
    assert functions[0](["a"]) == [2.0] and own.level == 2 and heard == [[1.0], [2.0]]


class Tower(torch.nn.Module):
    """Computes one layer more than it reads, as LLaVA-Next's vision tower does, and detaches one where asked."""

    def __init__(self, detach=False, functional=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.head, self.detach, self.functional = torch.nn.Linear(4, 2), detach, functional

    def forward(self, inputs):
        """Return what the second layer's output gives."""
        hidden = torch.nn.functional.dropout(self.layers[0](inputs), 0.5, self.training)
        hidden = hidden.detach() if self.detach else hidden
        states = [self.layers[1](hidden)]
        if self.functional:  # read past its module, and without a gradient
            states[0] = states[0] + self.layers[2].weight.detach().sum()
        states.append(self.layers[2](states[0]))
        return {"logits": self.head(states[0])}


def judge_gradients(model, *calls):
    """Give a guard one step of a model, and return it with its notices."""
    notices = []
    guard = guards.GradientGuard(notices.append)
    state = types.SimpleNamespace(global_step=0, is_world_process_zero=False)
    guard.on_train_begin(None, state, None, model=model.train())
    for call in calls:
        output = model(**call)
        (output["loss"] if "loss" in output else output["logits"].square().sum()).backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    guard.on_pre_optimizer_step(None, state, None, model=model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    return guard, notices


@pytest.mark.parametrize(
    ("more", "kinds", "unused", "missing"),
    [
        ({}, ["note"], 2, 0),
        ({"detach": True}, ["found"], 0, 4),  # the first layer is used, and has no gradient
        ({"functional": True}, ["found"], 0, 2),
    ],
)
def test_tensors_that_no_forward_pass_used_are_told_and_stop_nothing(more, kinds, unused, missing):
    """LLaVA-Next, in tests of trl's own, was stopped. A layer that is used and detached is found all the same."""
    guard, notices = judge_gradients(Tower(**more), {"inputs": torch.randn(3, 4)}, {"inputs": torch.randn(2, 4)})
    assert [notice.kind for notice in notices] == kinds
    assert (len(guard.report.unused), len(guard.report.without_gradient)) == (unused, missing)
    assert guard.report.learns is not bool(missing)


def test_layers_that_checkpointing_cuts_off_are_used(cut_off):
    """F1's control: these layers get no gradient, and what they compute reaches the loss."""
    ids = torch.arange(12).reshape(2, 6) % 32
    guard, notices = judge_gradients(cut_off, {"input_ids": ids, "labels": ids, "use_cache": False})
    assert [notice.kind for notice in notices] == ["found"] and notices[0].failures == ("F1",)
    assert len(guard.report.without_gradient) == 24 and not guard.report.unused


def test_a_head_that_is_tied_is_used(model):
    """Its weight stands in two modules, and one alone may be called."""
    model.tie_weights()
    embeddings = model.get_input_embeddings()
    embeddings.weight.requires_grad_(True)
    ids = torch.arange(12).reshape(2, 6) % 32
    embeddings.forward = lambda given: torch.nn.functional.embedding(given, embeddings.weight).detach()
    checkpoint(model, reentrant=False)
    guard, notices = judge_gradients(model, {"input_ids": ids, "labels": ids, "use_cache": False})
    assert not notices and guard.report.learns
    assert not gradients.find_unused(
        model, ["model.embed_tokens.weight"], [gradients.ForwardPass((), {"input_ids": ids})]
    )
