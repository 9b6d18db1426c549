"""Updates that round to nothing: the share predicted from numbers alone, and the guard on real and made-up runs."""

import types

import pytest
import torch
from small import lora, master, moving, qwen2, said

from failurelab import guards, updates


def test_numbers_that_can_be_worked_out_by_hand(monkeypatch):
    """Between 1 and 2 neighbours in bfloat16 are 2**-7 apart, below 1 half as far, and ties go to the even one."""
    one = torch.ones(1, dtype=torch.bfloat16)
    assert updates.expected_share(one, 2.0**-7) == 1
    assert updates.expected_share(one, 2.0**-8 - 2.0**-20) == 0.5  # downwards only
    assert updates.expected_share(one, 2.0**-8) == 0.5  # a tie upwards goes back to 1, which is even
    assert updates.expected_share(one, 2.0**-10) == 0
    assert updates.expected_share(one.float(), 2.0**-10) == 1
    assert updates.expected_share(one.float(), 2.0**-10, dtype=torch.bfloat16) == 0
    assert updates.expected_share(torch.zeros(3, dtype=torch.bfloat16), 1e-9) == 1
    assert updates.expected_share(torch.zeros(3, dtype=torch.float16), 1e-9) == 0  # it has no smaller number than 6e-8
    weights = torch.randn(1000).bfloat16()
    whole = updates.expected_share(weights, 1e-3)
    monkeypatch.setattr(updates, "_CHUNK", 7)
    assert updates.expected_share(weights, 1e-3) == whole


def test_a_model_of_mixed_dtypes_with_frozen_parts():
    model = qwen2(dtype=torch.bfloat16)
    model.get_input_embeddings().requires_grad_(False)
    model.model.norm.float()
    report = updates.share_that_changes(model, 1e-6)
    assert list(report.by_dtype) == [torch.bfloat16, torch.float32]
    assert report.by_dtype[torch.bfloat16][1] < 0.1 and report.by_dtype[torch.float32][1] == 1
    assert report.elements == sum(p.numel() for p in model.parameters() if p.requires_grad)
    asked = updates.shares(model.named_parameters(), 1e-6, dtype=torch.float32)
    assert asked.share > 0.99 and set(asked.by_dtype) == {torch.float32}


def test_what_has_no_numbers_is_left_out():
    tensors = {"four_bit": torch.zeros(2, dtype=torch.uint8), "offloaded": torch.zeros(2, device="meta")}
    tensors["partitioned"] = partitioned = torch.zeros(0)
    partitioned.ds_id = 1
    report = updates.shares([*tensors.items(), ("kept", torch.ones(2))], 1e-6)
    assert report.elements == 2 and set(report.left_out) == set(tensors)
    with pytest.raises(updates.UpdateError, match=r"no weights to judge .*offloaded.*Next") as error:
        updates.shares(list(tensors.items())[1:2], 1e-6)
    assert "\n" not in str(error.value)
    with pytest.raises(updates.UpdateError, match="nothing is trainable"):
        updates.share_that_changes(torch.nn.Linear(2, 2).requires_grad_(False), 1e-6)
    with pytest.raises(updates.UpdateError, match="changes nothing"):
        updates.share_that_changes(torch.nn.Linear(2, 2), 0.0)


def stochastic(state, weights, step):
    """Round up or down at random, so that each step is right on average."""
    bits = (weights.float() - step).view(torch.int32)
    weights.copy_(((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(torch.float32))


class Partition(torch.optim.AdamW):
    """Steps one flat float32 copy of all parameters, as ZeRO's optimizers do, and then writes it back."""

    def __init__(self, parameters, **options):
        self.model = list(parameters)
        self.flat = torch.nn.Parameter(torch.cat([p.detach().float().reshape(-1) for p in self.model]))
        super().__init__([self.flat], **options)

    @torch.no_grad()
    def step(self, closure=None):
        self.flat.grad = torch.cat([p.grad.float().reshape(-1) for p in self.model])
        super().step()
        start = 0
        for weights in self.model:
            weights.copy_(self.flat[start : start + weights.numel()].view_as(weights))
            start += weights.numel()


def run(model, rates, *, optimizer=torch.optim.AdamW, action="warn", gradient=lambda step, p: torch.randn_like(p)):
    """Give a guard steps as a trainer would; return the guard, and the messages of its warnings."""
    torch.manual_seed(0)
    guard = guards.UpdateGuard(action)
    steps = optimizer([p for p in model.parameters() if p.requires_grad], lr=1.0, weight_decay=0.0)
    with said() as messages:
        guard.on_train_begin(None, None, None, model=model)
        for number, rate in enumerate(rates):
            state = types.SimpleNamespace(global_step=number)
            for group in steps.param_groups:
                group["lr"] = rate
            for parameter in model.parameters():
                parameter.grad = gradient(number, parameter) if parameter.requires_grad else None
            guard.on_pre_optimizer_step(None, state, None, model=model, optimizer=steps)
            steps.step()
            guard.on_optimizer_step(None, state, None, model=model, optimizer=steps)
        guard.on_train_end(None, None, None)
    return guard, messages


def low(dtype=torch.bfloat16):
    """Return a model whose biases are not zero, as those of a trained one are."""
    model = qwen2(dtype=dtype)
    for parameter in model.parameters():
        if not parameter.detach().any():
            parameter.data.normal_(std=0.02)
    return model


def test_steps_that_round_to_nothing_are_told():
    guard, messages = run(low(), [1e-6] * 6)
    assert len(messages) == 1 and guard.report.grade == "lost" and guard.report.dtypes == ("bfloat16",)
    assert guard.report.predicted / 2 < guard.report.share < guard.report.predicted < 0.05  # the second step is smaller
    with pytest.raises(guards.GuardTripped, match="UpdateGuard: in steps 1 to 3 together"):
        run(low(), [1e-6] * 6, action="stop")
    _, messages = run(low(), [1e-6, 8e-7, 5e-7, 2e-7])  # a share of three steps was told as that of the third
    assert "in steps 1 to 3 together, at learning rates of 1e-06 to 5e-07, " in messages[0]
    for wrong in ({"least": 0}, {"steps": 1}):
        with pytest.raises(ValueError):
            guards.UpdateGuard(**wrong)


class Elsewhere(torch.optim.AdamW):
    """Steps copies that nobody reads."""

    def step(self, closure=None):
        """Step them."""


def test_steps_that_change_nothing_are_no_rounding():
    guard, messages = run(low(torch.float32), [1e-3] * 6, optimizer=Elsewhere)
    assert len(messages) == 1 and "that is no rounding" in messages[0] and guard.report.changed == 0


def test_float32_is_measured_too():
    """A usual step changes all that has a gradient, and that is counted; one far too small is lost there too."""
    guard, messages = run(low(torch.float32), [1e-6] * 6)
    assert messages == [] and guard.report.dtypes == ("float32",) and guard.report.share > 0.99
    mixed = low()
    mixed.model.layers.float()
    guard, _ = run(mixed, [1e-6] * 6)
    assert guard.report.grade == "lost" and guard.report.dtypes == ("bfloat16",)
    guard, messages = run(low(torch.float32), [1e-11] * 6)
    assert guard.report.grade == "lost" and guard.report.share < 0.05 and "a larger learning rate" in messages[0]


def adapter(dtype=torch.float32):
    """Return a LoRA on bfloat16, whose adapters PEFT makes in float32, and trl keeps or casts."""
    model = lora(qwen2(dtype=torch.bfloat16))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize(
    ("build", "rate", "grade", "told"),
    [
        (low, 3e-5, "slowed", "dtype=torch.float32"),
        (low, 1e-2, "whole", ""),
        (lambda: adapter(torch.bfloat16), 2e-4, "slowed", "updates.to_float32(trainer.model)"),
    ],
    ids=["a part", "nearly all", "adapters"],
)
def test_a_part_that_changes_is_a_note_and_stops_nothing(build, rate, grade, told):
    """An adapter's B begins at zero and moves whole, so the other half is what is graded."""
    guard, messages = run(build(), [rate] * 6, action="stop")
    assert guard.report.grade == grade and len(messages) == bool(told)
    assert not told or told in messages[0]
    if "to_float32" in told:
        assert guard.report.from_zero == 4 and guard.report.rest < guard.report.share


def test_adapters_are_cast_back_in_place():
    """The parameters stay the objects that an optimizer holds; numbers and frozen weights stay, and so does a name."""
    model = adapter(torch.bfloat16)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    cast = updates.to_float32(model)
    assert len(cast) == 8 and updates.to_float32(model) == []
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter.detach().bfloat16(), before[name][1].bfloat16())
        assert parameter.dtype == (torch.float32 if name in cast else torch.bfloat16)
    weight = model.get_parameter(cast[0])
    weight.data, weight.ds_id = torch.zeros(0).bfloat16(), 0
    with pytest.raises(updates.UpdateError, match="partitioned by ZeRO-3"):
        updates.to_float32(model)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (qwen2, {}),
        (adapter, {}),
        (low, {"rates": [0.0, *(2e-7 * power for power in range(1, 6)), *[1e-2] * 4]}),
        (low, {"gradient": lambda step, p: torch.zeros_like(p)}),
        (low, {"optimizer": moving(stochastic)}),
        (low, {"optimizer": moving(master)}),
        (low, {"optimizer": Partition}),
    ],
    ids=["float32", "adapter", "warm-up", "zero-gradients", "stochastic", "master", "partition"],
)
def test_no_false_alarm(build, options):
    _, messages = run(build(), **{"rates": [1e-6] * 6} | options)
    assert messages == []


def test_no_optimizer_to_ask_is_said_once():
    guard = guards.UpdateGuard()
    guard.on_train_begin(None, None, None)
    with pytest.warns(guards.GuardWarning, match="UpdateGuard: could not check: ") as said:
        for _ in range(2):
            guard.on_pre_optimizer_step(None, None, None, model=qwen2(), optimizer=None)
    assert len(said) == 1
