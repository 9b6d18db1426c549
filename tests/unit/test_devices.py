"""Devices: every cause of a missing GPU has its own line; nothing moves to the CPU without a word."""

import contextlib
import os
import types
import warnings

import pytest
import torch

from failurelab_course.experiments import devices


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
}


@pytest.mark.parametrize(
    ("place", "attributes", "says"),
    [
        (torch.version, {"cuda": None}, "is a build for CPUs. Next: install a CUDA build"),  # most laptops
        (torch.cuda, {"is_available": warned}, "driver (580.159.04) is too old for torch"),
        (os.environ, {"CUDA_VISIBLE_DEVICES": ""}, "hides every GPU. Next: unset it"),  # easily left in a shell
        (devices, {"driver": lambda: ""}, "no NVIDIA driver"),  # a container without the GPU passed to it
        (devices, {}, "finds no GPU (it says no more). Next: compare with nvidia-smi"),
        # `is_available` is true there, and the first kernel fails
        (
            torch.cuda,
            PASCAL | {"get_arch_list": lambda: ["sm_75", "sm_90"]},
            "Tesla P100 (compute capability 6.0) cannot",
        ),
    ],
)
def test_why_no_gpu_can_be_used(cuda_build, place, attributes, says):
    cuda_build.setattr(torch, "zeros", no_kernel)
    for name, value in attributes.items():
        cuda_build.setitem(place, name, value) if place is os.environ else cuda_build.setattr(place, name, value)
    assert all(part in devices.gpu_problem() for part in (*says.split("..."), "Next: "))
    with pytest.raises(devices.TierError, match="device cuda is asked for, and "):
        devices.resolve("cuda")
    assert devices.resolve("auto") == devices.resolve("cpu") == "cpu"


def test_a_working_card_is_taken(card):
    """`auto` and `cuda` mean it; a number that is not there is refused."""
    assert devices.resolve("auto") == "cuda"
    assert devices.resolve("cuda:0") == "cuda:0"
    with pytest.raises(devices.TierError, match=r"sees 1 GPU"):
        devices.resolve("cuda:1")


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


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "tpu"])
def test_another_word_is_refused(device):
    with pytest.raises(devices.TierError, match=r"unknown device.* Next: give one of auto, cpu, cuda"):
        devices.resolve(device)


@pytest.mark.parametrize(("total", "step"), [(8, "--model tiny, or a larger card"), (80, "end what else runs on it")])
def test_a_card_too_small_is_told_from_a_full_one(card, total, step):
    card.setattr(torch.cuda, "mem_get_info", lambda *_: (4 * devices.GIB, total * devices.GIB))
    with pytest.raises(devices.TierError, match=rf"{total}\.0 GiB, 4\.0 of them free, and this step needs 12.*{step}"):
        devices.require_memory(12, "cuda", "this step")
    devices.require_memory(3, "cuda", "this step")
    devices.require_memory(10**6, "cpu", "this step")
