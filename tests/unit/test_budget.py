"""A budget: a step that does not fit is an error of memory, real on a GPU and simulated elsewhere; all is undone."""

import types

import pytest
import torch
from small import run_child

from failurelab.simulate import budget
from failurelab_course.experiments import shapes

CHILD = """
import torch
from failurelab import logits
from failurelab.simulate import budget
from failurelab_course.experiments import shapes

net = budget.model(shapes.config("random-0.5b", 1), "cpu")
ids = budget.tokens(net, 4, 512)
def step():
    logits.completion_logps(net, ids, None, 64).mean().backward()
def all_rows():
    net(ids, use_cache=False).logits.float().mean().backward()
print(budget.tier(net), budget.spend(step, 2, net) < budget.GIB * 2)
try:
    budget.spend(all_rows, 1, net)
except torch.OutOfMemoryError as error:
    print(type(error).__name__, str(error))
print(all(p.grad is None for p in net.parameters()))
"""


def test_a_simulated_step_that_does_not_fit_raises_as_a_gpu_would():
    """In a child, for the simulation holds for the process."""
    fits, refused, clean = run_child(CHILD).splitlines()
    assert fits == "simulated True"
    assert refused.startswith("DoesNotFit the step needs ") and refused.endswith(" GiB of 1.0 (tier: simulated)")
    assert clean == "True"


@pytest.fixture
def card(monkeypatch):
    """A card of 80 GiB, as far as a machine without one can pretend; what is asked of it is written down."""
    card = types.SimpleNamespace(free=80 * budget.GIB, total=80 * budget.GIB, fractions=[], emptied=0)

    def empty():
        card.emptied += 1

    answers = {
        "mem_get_info": lambda *_: (card.free, card.total),
        "get_device_name": lambda *_: "NVIDIA Pretended",
        "memory_reserved": lambda *_: 2 * budget.GIB,
        "max_memory_allocated": lambda *_: 2 * budget.GIB,
        "reset_peak_memory_stats": lambda *_: None,
        "synchronize": lambda *_: None,
        "set_per_process_memory_fraction": lambda fraction, _: card.fractions.append(fraction),
        "empty_cache": empty,
        "is_bf16_supported": lambda **_: True,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return card


def test_a_gpu_is_limited_for_the_block_and_given_back_after_an_error(card):
    """A limit that stays would break every later cell."""
    with pytest.raises(KeyError), budget.limit(6, "cuda"):
        assert card.fractions == [6 / 80]
        raise KeyError
    assert card.fractions == [6 / 80, 1.0] and card.emptied == 2


def test_a_card_with_less_than_the_budget_is_said(card):
    """The step would then run out of the card's memory, and the budget would prove nothing."""
    card.free, card.total = 3 * budget.GIB, 4 * budget.GIB
    with (
        pytest.raises(budget.BudgetError, match=r"4\.0 GiB, 3\.0 of them free, and a budget of 6 GiB needs 4\.0"),
        budget.limit(6, "cuda"),
    ):
        raise AssertionError("it was not refused")
    assert card.fractions == []


@pytest.mark.parametrize(("gib", "device"), [(6, "cpu"), (0, "cuda"), (-1, "cuda")])
def test_no_limit_where_there_is_none(card, gib, device):
    """A CPU cannot be limited so: to say nothing would let a notebook claim a budget that never was."""
    with pytest.raises(ValueError, match="a GPU can be limited"), budget.limit(gib, device):
        raise AssertionError("it was not refused")


def test_after_out_of_memory_nothing_of_the_step_is_held(card):
    """The original's traceback keeps the step's tensors alive: a second step would fail for the first one's."""
    held = []

    def step():
        large = torch.zeros(3)
        held.append(large.untyped_storage()._weak_ref())
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.64 GiB.")

    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.64 GiB") as caught:
        budget._measure(step, torch.device("cuda"))
    assert type(caught.value) is torch.OutOfMemoryError
    assert torch.UntypedStorage._expired(held[0])
    assert budget._measure(lambda: None, torch.device("cuda")) == 2 * budget.GIB


def test_real_models_are_real(card, monkeypatch):
    """On a GPU: bfloat16 where the card can, tokens from the vocabulary; here both are made on the CPU."""
    build, config = budget._build, shapes.config("tiny", 1)
    monkeypatch.setattr(
        budget, "_build", lambda shape, device, *more: (device, build(shape, torch.device("cpu"), *more))
    )
    before = torch.get_rng_state()
    device, net = budget.model(config, "cuda", seed=1)
    assert device.type == "cuda" and torch.equal(torch.get_rng_state(), before)
    assert net.training and net.dtype == torch.bfloat16 and budget.tier(net) == "gpu"
    assert torch.equal(net.lm_head.weight, budget.model(config, "cuda", seed=1)[1].lm_head.weight)
    ids = budget.tokens(net, 2, 50)
    assert ids.shape == (2, 50) and int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size
    card.free = 0
    with pytest.raises(budget.BudgetError, match="the model with its gradients needs"):
        budget.model(config, "cuda")
