"""Where a run computes, and with which model: a CPU by default, a GPU where one is asked for and works.

A figure belongs to the tier that it was measured on, so a run that asked for a GPU must not end up on the CPU without a
word. And "torch finds no GPU" has several causes with different next steps: here they are told apart.

Two sizes: the small Qwen2 learns within a minute anywhere, and is what learning is shown with. `random-0.5b` has
Qwen2-0.5B's shape and knows nothing: it is for memory, time and placement. A hub model or a folder serves both.
"""

import os
import pathlib
import re
import subprocess
import sys
import warnings

import torch

from failurelab_course.experiments import machine
from failurelab_course.experiments.machine import TierError as TierError

GIB = 2**30


def resolve(device: str | torch.device = "auto") -> str:
    """Return `cpu`, `cuda` or `cuda:N`: what `device` means on this machine.

    Args:
        device: `auto` is the GPU if one works here, else the CPU; others are taken at their word.

    Raises:
        UnknownDevice: no such device.
        TierError: a GPU is asked for and none works; says why, and the next step.
    """
    name = str(device)
    number = machine.read_device(name)
    if name == "cpu":
        return name
    problem = gpu_problem()
    if name == "auto":
        return "cpu" if problem else "cuda"
    if problem:
        raise TierError(f"device {name} is asked for, and {problem}, or run with --device cpu")
    if number and number >= torch.cuda.device_count():
        raise TierError(
            f"device {name} is asked for, and this process sees {torch.cuda.device_count()} GPU(s), numbered from 0. "
            "Next: a smaller number, or look at CUDA_VISIBLE_DEVICES"
        )
    return name


def argument(text: str) -> str:
    """Return the device that a script's `--device` means; for argparse, as `type=devices.argument`.

    Raises:
        SystemExit: there is no such device (status 2), or it cannot be used (3); one line on stderr says why.
    """
    try:
        return resolve(text)
    except TierError as error:
        print(f"{pathlib.Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None


def gpu_problem() -> str:
    """Return why no GPU can be used by this process, with the next step; empty if one works."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build for CPUs. Next: install a CUDA build of the same version of torch"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    said = " ".join(str(warning.message) for warning in caught)
    if not available:
        return _why_unavailable(said)
    try:
        # The first kernel fails where the card is older than this build of torch supports.
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        major, minor = torch.cuda.get_device_capability()
        return (
            f"{torch.cuda.get_device_name()} (compute capability {major}.{minor}) cannot run a kernel of torch "
            f"{torch.__version__}: {first}. Next: a build of torch for this card (it has "
            f"{', '.join(torch.cuda.get_arch_list()) or 'none'}), or end what fills its memory"
        )
    return ""


def _why_unavailable(said: str) -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU. Next: unset it"
    if "driver on your system is too old" in said:
        have = driver() or "of an unknown version"
        return (
            f"the NVIDIA driver ({have}) is too old for torch {torch.__version__}, which was built for CUDA "
            f"{torch.version.cuda}. Next: a newer driver, or a build of torch for an older CUDA"
        )
    if not driver():
        return "no NVIDIA driver is loaded on this machine. Next: nvidia-smi must list a GPU first"
    return (
        f"torch {torch.__version__} finds no GPU ({said.strip() or 'it says no more'}). Next: compare with nvidia-smi"
    )


def driver() -> str:
    """Return the NVIDIA driver's version, such as `580.159.04`; empty if there is none."""
    try:
        match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", pathlib.Path("/proc/driver/nvidia/version").read_text())
        if match:
            return match[1]
    except OSError:
        pass
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def describe(device: str) -> dict[str, object]:
    """Return what `machine.describe` says of a device, but for versions; raises as `resolve`."""
    device = resolve(device)
    if device == "cpu":
        return machine.CPU
    total = torch.cuda.mem_get_info(device)[1]
    with torch.cuda.device(device):  # unasked, torch counts a bfloat16 that it emulates: a T4 has no units for it
        in_units = torch.cuda.is_bf16_supported(including_emulation=False)
    return {
        "device": device,
        "name": torch.cuda.get_device_name(device),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "memory_gib": round(total / GIB, 1),
        "bfloat16": in_units,
    }


def require_memory(gib: float, device: str | torch.device, what: str) -> None:
    """Make sure that a GPU has `gib` GiB free for `what`; a CPU is not asked.

    Raises:
        TierError: the card is too small, or too much of it is taken; says which.
    """
    if torch.device(device).type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if free >= gib * GIB:
        return
    memory = f"{torch.cuda.get_device_name(device)} has {total / GIB:.1f} GiB, {free / GIB:.1f} of them free"
    step = "--model tiny, or a larger card" if total < gib * GIB else "end what else runs on it (nvidia-smi lists it)"
    raise TierError(f"{memory}, and {what} needs {gib:.1f}. Next: {step}")
