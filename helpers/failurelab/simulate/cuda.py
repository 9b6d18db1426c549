"""What one process knows of a node's GPUs, where there are none: `torch.cuda`, as far as a script asks it.

CUDA reads `CUDA_VISIBLE_DEVICES` when it is first used, not when torch is imported, so that the variable may be set in
a script, and may be set too late. A process begins at device 0, whatever its rank, until something sets another.

Source: torch `cuda.device_count`.
"""

import os
import types
from typing import Any

import torch

MEMORY, CAPABILITY = 80 * 2**30, (8, 0)  # bytes, and what it can compute: bfloat16, say
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(value: str | None, gpus: int) -> int:
    """Return how many GPUs this `CUDA_VISIBLE_DEVICES` lets a process see: those before the first that is not there."""
    if value is None:
        return gpus
    count = 0
    for part in value.split(","):
        if not part.strip().isdigit() or int(part) >= gpus:
            break
        count += 1
    return count


class Cuda:
    """What one process knows of the node's GPUs; `CUDA_VISIBLE_DEVICES` is read until the first use, as CUDA does.

    Args:
        gpus: of the node.
        seen: how many of them the process sees; by default as the variable says.

    Attributes:
        current: the process's device.
        chosen: whether anything has set it; it is 0 in every process until then.
    """

    def __init__(self, gpus: int, seen: int | None = None) -> None:
        self.gpus, self.current, self.chosen = gpus, 0, False
        self._read = seen

    def use(self, index: int) -> None:
        """Note the first use, which settles what is visible.

        Raises:
            RuntimeError: there is no such device.
        """
        if self._read is None:
            self._read = self.device_count()
        if not 0 <= index < self._read:
            raise RuntimeError(f"CUDA error: invalid device ordinal (device {index}, and {self._read} are visible)")

    def device_count(self) -> int:
        """As of torch.cuda; no first use."""
        return visible(os.environ.get(VISIBLE), self.gpus) if self._read is None else self._read

    def is_available(self) -> bool:
        """As of torch.cuda; no first use."""
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        """Whether there was a first use."""
        return self._read is not None

    def current_device(self) -> int:
        """As of torch.cuda; a first use."""
        self.use(self.current)
        return self.current

    def set_device(self, device: Any) -> None:
        """As of torch.cuda; a first use."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        self.use(index)
        self.current, self.chosen = index, True

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        """What nn.DataParallel and scripts ask for; all GPUs are alike."""
        self.use(0)
        major, minor = CAPABILITY
        return types.SimpleNamespace(
            name="simulated", total_memory=MEMORY, multi_processor_count=1, major=major, minor=minor
        )

    def get_device_name(self, device: Any = None) -> str:
        """As of torch.cuda; a first use."""
        return str(self.get_device_properties(device).name)

    def functions(self) -> dict[str, Any]:
        """Return the functions of torch.cuda that this one stands in for, by name."""
        return {name: getattr(self, name) for name in _FUNCTIONS}


_FUNCTIONS = (
    "device_count",
    "is_available",
    "is_initialized",
    "current_device",
    "set_device",
    "get_device_properties",
    "get_device_name",
)
