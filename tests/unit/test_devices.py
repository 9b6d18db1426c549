"""Devices: every cause of a missing GPU has its own line; nothing moves to the CPU without a word."""

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


def test_a_build_for_cpus_is_said(monkeypatch):
    """Most laptops: the GPU may be there, and torch is not built for it."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(devices.TierError, match=r"cuda is asked for.* build for CPUs\. Next: install a CUDA build"):
        devices.resolve("cuda")
    assert devices.resolve("auto") == "cpu"
    assert devices.resolve("cpu") == "cpu"


def test_a_driver_too_old_is_said(cuda_build):
    """Torch says it in a warning only, which a notebook hides."""

    def unavailable():
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).", stacklevel=1
        )
        return False

    cuda_build.setattr(torch.cuda, "is_available", unavailable)
    with pytest.raises(devices.TierError, match=r"driver \(580\.159\.04\) is too old .* CUDA 13\.0\. Next: a newer"):
        devices.resolve("cuda")


@pytest.mark.parametrize(
    ("visible", "driver", "says"),
    [
        ("", "580.159.04", "hides every GPU. Next: unset it"),  # easily left behind in a shell
        (None, "", "no NVIDIA driver"),  # a container without the GPU passed to it
        (None, "580.159.04", "finds no GPU (it says no more). Next: compare with nvidia-smi"),
    ],
)
def test_a_gpu_that_is_not_seen_says_why(cuda_build, visible, driver, says):
    if visible is not None:
        cuda_build.setenv("CUDA_VISIBLE_DEVICES", visible)
    cuda_build.setattr(devices, "driver", lambda: driver)
    assert says in devices.gpu_problem()


def test_a_card_that_torch_no_longer_supports_is_said(cuda_build):
    """`is_available` is true there, and the first kernel fails."""

    def kernel(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    cuda_build.setattr(torch.cuda, "is_available", lambda: True)
    cuda_build.setattr(torch.cuda, "get_device_capability", lambda *_: (6, 0))
    cuda_build.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla P100")
    cuda_build.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    cuda_build.setattr(torch, "zeros", kernel)
    assert "Tesla P100 (compute capability 6.0) cannot run" in devices.gpu_problem()
    assert "sm_75, sm_90" in devices.gpu_problem()


def test_a_working_card_is_taken(card):
    """`auto` and `cuda` mean it; a number that is not there is refused."""
    assert devices.resolve("auto") == "cuda"
    assert devices.resolve("cuda:0") == "cuda:0"
    with pytest.raises(devices.TierError, match=r"sees 1 GPU"):
        devices.resolve("cuda:1")


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
