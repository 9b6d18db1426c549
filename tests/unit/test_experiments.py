"""What runs in any stack: records, peaks of memory, devices and why none can be used, expected failures, families."""

import contextlib
import json
import math
import os
import types
import warnings

import pytest
import torch

from failurelab_course.experiments import devices, memory, observe
from failurelab_course.experiments.expect import UnexpectedOutcome, expect_failure


@pytest.fixture
def evidence_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FAILURELAB_EVIDENCE", str(tmp_path))
    monkeypatch.setenv("FAILURELAB_SOURCE", "a test")
    return tmp_path


def test_a_record_says_what_ran_where(evidence_folder):
    record = observe.record("F1", "broken", {"changed": 1, "loss": torch.tensor(0.5)}, case="frozen", seed=3)
    (path,) = evidence_folder.glob("*.jsonl")
    assert json.loads(path.read_text()) == record
    assert record["figures"] == {"changed": 1, "loss": 0.5}
    assert torch.__version__.startswith(record["versions"]["torch"])  # a wheel may leave its +cu130 out
    assert (record["tier"], record["seed"], record["source"]) == ("cpu", 3, "a test")
    assert record["processor"].endswith(f"torch uses {torch.backends.cpu.get_cpu_capability()}")


def test_figures_that_json_cannot_hold(evidence_folder):
    assert observe.record("F1", "broken", {"loss": math.nan})["figures"]["loss"] == "nan"
    with pytest.raises(ValueError, match="figure 'logits' is a Tensor"):
        observe.record("F1", "broken", {"logits": torch.zeros(2)})
    for state, tier in (("fixed", None), ("broken", "tpu")):  # words that the schema has not
        with pytest.raises(ValueError, match="is one of"):
            observe.record("F1", state, {}, tier=tier)


def test_warnings_are_counted_every_one(recwarn):
    """Python shows a warning of one line once; the count is of all, and none reaches the reader."""
    with observe.count_warnings("requires_grad") as seen:
        for _ in range(3):
            warnings.warn("None of the inputs have requires_grad=True", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert seen.count == 3
    assert not recwarn.list


def test_peak_memory_is_that_of_the_tensors_of_the_step():
    """Two tensors of 4 MiB live at once, a third after one has gone: the peak is 8 MiB over what was held before."""
    held = torch.zeros(1 << 22)

    def step():
        first = torch.zeros(1 << 20)
        second = first + 1
        del first
        return (second * 2).sum()

    measured = observe.peak_memory(step)
    assert abs(measured - (8 << 20)) < 4096 and held.numel()
    with pytest.raises(ValueError, match=r"memory of a mps device is not counted.*Next: "):
        observe.peak_memory(lambda: None, "mps")  # the CPU's profiler would see nothing, and say 0


def test_the_blocks_at_the_peak_are_told_with_what_allocated_them():
    """Of 4, 2 and 1 MiB the first two are held together; what has gone before the peak, or comes after it, is not."""
    held = torch.zeros(1 << 18)

    def step():
        nonlocal held
        held = None  # was there before, and goes during the step
        gone = torch.zeros(1 << 18)
        del gone
        first, second = torch.zeros(1 << 20), torch.ones(1 << 19)
        del first, second
        return torch.zeros(1 << 18)

    blocks = [(size >> 20, operation) for size, operation in memory.held_at_peak(step) if size > 4096]
    assert blocks == [(4, "aten::zeros"), (2, "aten::ones")]


# Devices: every cause of a missing GPU has its own line; nothing moves to the CPU without a word.


@pytest.fixture
def cuda_build(monkeypatch):
    """A CUDA build of torch on a machine whose driver is there; no GPU yet."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "driver", lambda: "580.159.04")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


@pytest.fixture
def card(cuda_build):
    """A GPU that works, as far as a machine without one can pretend."""
    cuda_build.setattr(devices, "gpu_problem", lambda: "")
    cuda_build.setattr(torch.cuda, "device_count", lambda: 1)
    cuda_build.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Pretended")
    return cuda_build


def warned():
    """Torch says it in a warning only, which a notebook hides."""
    warnings.warn("The NVIDIA driver on your system is too old (found version 11040).", stacklevel=1)
    return False


def no_kernel(*_, **__):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")


PASCAL = {
    "is_available": lambda: True,
    "get_device_capability": lambda: (6, 0),
    "get_device_name": lambda: "Tesla P100",
    "get_arch_list": lambda: ["sm_75", "sm_90"],
}


@pytest.mark.parametrize(
    ("place", "attributes", "says"),
    [
        (torch.version, {"cuda": None}, "is a build for CPUs"),  # most laptops
        (torch.cuda, {"is_available": warned}, "too old"),
        (os.environ, {"CUDA_VISIBLE_DEVICES": ""}, "hides every GPU"),  # easily left in a shell
        (devices, {"driver": lambda: ""}, "no NVIDIA driver"),  # a container without the GPU passed to it
        (devices, {}, "finds no GPU"),
        (torch.cuda, PASCAL, "Tesla P100"),  # `is_available` is true there
    ],
)
def test_why_no_gpu_can_be_used(cuda_build, place, attributes, says):
    cuda_build.setattr(torch, "zeros", no_kernel)
    for name, value in attributes.items():
        cuda_build.setitem(place, name, value) if place is os.environ else cuda_build.setattr(place, name, value)
    assert all(part in devices.gpu_problem() for part in (says, "Next: "))
    with pytest.raises(devices.TierError, match="device cuda is asked for, and "):
        devices.resolve("cuda")
    assert devices.resolve("auto") == devices.resolve("cpu") == "cpu"


def test_a_working_card_is_taken(card):
    assert (devices.resolve("auto"), devices.resolve("cuda:0")) == ("cuda", "cuda:0")
    for device, said in (("cuda:1", "sees 1 GPU"), ("gpu", r"unknown device.* Next: give one of auto, cpu, cuda")):
        with pytest.raises(devices.TierError, match=said):
            devices.resolve(device)


@pytest.mark.parametrize(("capability", "in_units"), [((7, 5), False), ((8, 0), True)])
def test_a_bfloat16_that_torch_emulates_is_told_from_one_in_units(card, capability, in_units):
    """A T4 makes such tensors, so torch says that it supports them."""
    card.setattr(torch.cuda, "mem_get_info", lambda *_: (15 * devices.GIB, 16 * devices.GIB))
    card.setattr(torch.cuda, "is_available", lambda: True)
    card.setattr(torch.cuda, "current_device", lambda: 0)
    card.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    card.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    card.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(major=capability[0]))
    assert devices.describe("cuda")["bfloat16"] is in_units


@pytest.mark.parametrize(("total", "step"), [(8, "--model tiny, or a larger card"), (80, "end what else runs on it")])
def test_a_card_too_small_is_told_from_a_full_one(card, total, step):
    card.setattr(torch.cuda, "mem_get_info", lambda *_: (4 * devices.GIB, total * devices.GIB))
    with pytest.raises(devices.TierError, match=rf"this step needs 12.*{step}"):
        devices.require_memory(12, "cuda", "this step")
    devices.require_memory(3, "cuda", "this step")
    devices.require_memory(10**6, "cpu", "this step")


# An expected failure says its reason; its absence, or another failure, is an error.


def test_the_expected_failure_is_printed_and_another_outcome_is_an_error(capsys):
    def end(raised):
        with expect_failure(RuntimeError, match="element 0"):
            if raised:
                raise raised

    end(RuntimeError("element 0 of tensors does not require grad\nsecond line"))
    assert capsys.readouterr().out == "RuntimeError: element 0 of tensors does not require grad (expected)\n"
    for raised, says in (
        (None, "nothing was raised"),  # a failure that has gone away must not pass unseen
        (NameError("trainr"), "NameError was raised"),  # a typing error in the cell
        (RuntimeError("out of memory"), "another reason"),
    ):
        with pytest.raises(UnexpectedOutcome, match=says) as seen:
            end(raised)
        assert seen.value.__cause__ is raised
    with pytest.raises(KeyboardInterrupt):
        end(KeyboardInterrupt())
