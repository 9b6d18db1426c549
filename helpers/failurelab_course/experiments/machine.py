"""What a run of notebooks computes on: asked once, before anything starts, in a process of its own.

In a process of its own, because torch takes seconds to import, and because whoever asks a GPU whether it works holds
some hundred MiB of it until the process ends.
"""

import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

from failurelab.errors import FailureLabError
from failurelab.failures.versions import LIBRARIES

_DEVICE = re.compile(r"auto|cpu|cuda(?::(\d+))?")
_LIBRARIES = (*LIBRARIES, "datasets")
# What decides how a CPU computes with bfloat16, and how wide: two processors without the same round differently.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")
CPU = {"device": "cpu", "name": f"{platform.machine()} CPU", "driver": "", "cuda": ""}
CPU |= {"memory_gib": None, "bfloat16": None}
_ASK = (
    "import json, sys; from failurelab_course.experiments import devices; "
    "print(json.dumps(devices.describe(sys.argv[1])))"
)


class TierError(FailureLabError):
    """A device cannot be used, or is too small; the message says what was found and the next step."""

    exit_status = 3


class UnknownDevice(TierError):
    """What was named is no device at all."""

    exit_status = 2


def read_device(name: str) -> int:
    """Return N of `cuda:N`; 0 for `auto`, `cpu` and `cuda`, which is the first one.

    Raises:
        UnknownDevice: it is none of these.
    """
    match = _DEVICE.fullmatch(name)
    if not match:
        raise UnknownDevice(f"unknown device {name!r}. Next: give one of auto, cpu, cuda, or cuda:N for GPU number N")
    return int(match[1] or 0)


def describe(device: str = "cpu") -> dict[str, Any]:
    """Return what a run on this device says of itself.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.

    Returns:
        `device` (resolved: `cpu`, `cuda` or `cuda:N`), `name` (the processor or card), `driver` and `cuda` (empty on a
        CPU), `memory_gib` (of the card; None on a CPU), `bfloat16` (whether the card has units for it, or torch
        emulates it; None on a CPU), and `versions` of Python and today's libraries.

    Raises:
        TierError: `device` is none, or cannot be used here.
    """
    read_device(device)
    return (CPU if device == "cpu" else _asked(device)) | {"versions": versions()}


@functools.cache
def _asked(device: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _ASK, device], capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    raise TierError(re.sub(r"^[\w.]*TierError: ", "", last))


def visible_gpus() -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in order; nothing where it is not set, or hides all."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def two_gpus(device: str) -> str:
    """Return the GPUs that two processes take, as CUDA_VISIBLE_DEVICES names them: for scripts that torchrun starts.

    Empty, so that they stay on the CPU, where `device` is the CPU or there are no two GPUs that compute. Ask before
    `notebook.setup`, which hides all but one from this process and from those that it starts.
    """
    if device == "cpu":
        return ""
    code = "import torch\nfor number in (0, 1):\n    torch.zeros(1, device=f'cuda:{number}').add_(1).item()"
    if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode:
        return ""
    return ",".join(visible_gpus()[:2] or ["0", "1"])


def processor(cpuinfo: str = "") -> str:
    """Return the processor's model and those of its instruction sets that decide how numbers are computed.

    Args:
        cpuinfo: what Linux says of it; by default it is read. Where it cannot be, only the architecture is known.
    """
    try:
        cpuinfo = cpuinfo or pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{platform.processor() or platform.machine()}, instruction sets unknown"
    first = dict(re.findall(r"^([\w ]+?)\s*: (.+)$", cpuinfo.partition("\n\n")[0], re.MULTILINE))
    flags = (first.get("flags") or first.get("Features", "")).split()
    have = " ".join(name for name in _INSTRUCTIONS if name in flags)
    return f"{first.get('model name', platform.machine())}, {have or 'none of ' + ' '.join(_INSTRUCTIONS)}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries under study that today's environment has."""
    installed = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def line(description: dict[str, Any]) -> str:
    """Return in one line what `describe` found: the tier, the device, the driver, the versions that matter most."""
    tier = "cpu" if description["device"] == "cpu" else "gpu"
    words = [f"tier: {tier}", description["name"]]
    words += [f"{description['memory_gib']:.0f} GiB"] if description["memory_gib"] else []
    words += ["bfloat16 emulated"] if description.get("bfloat16") is False else []
    words += [f"driver {description['driver']}"] if description["driver"] else []
    words += [f"CUDA {description['cuda']}"] if description["cuda"] else []
    shown = [name for name in ("torch", "transformers", "trl") if name in description["versions"]]
    words += [f"{name} {description['versions'][name]}" for name in shown]
    return ", ".join(words)
