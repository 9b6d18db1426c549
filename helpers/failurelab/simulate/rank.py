"""One process as one rank of a launch that has more: its variables, accelerate's state, and its device.

What goes wrong: a launcher tells each process its number at once (`LOCAL_RANK`), but nothing acts on it until something
first asks accelerate for its state, which then selects the rank's device. A device map that is made earlier names GPU 0
in every process, and on rank 0 that looks right.

Nobody else is there: there is no process group, and nothing is sent. `told_to_all` tells the script and every library,
as far as accelerate's check of a model; nothing can be trained. (`failurelab preflight` starts real processes.)

Sources: accelerate `PartialState.set_device`; torch `distributed.run`.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclasses.dataclass(frozen=True)
class Rank:
    """Which process of a launch on one machine.

    Attributes:
        number: from 0.
        count: of the processes.
        devices: that one process sees: where it is 1, a scheduler gives each process a GPU, and all are numbered 0.
        kind: of the devices.
        launched: whether a launcher numbers the process; else it is alone, as `python train.py` starts it.
    """

    number: int
    count: int
    devices: int
    kind: str = "cuda"
    launched: bool = True

    @property
    def device(self) -> torch.device:
        """The device that accelerate selects for this rank.

        Where nobody launched the process, accelerate's own has no index. Here it has: a map with the bare number 0,
        which is right there, can only be told by name on a machine without GPUs.
        """
        return torch.device(self.kind, self.number % max(1, self.devices))

    def variables(self) -> dict[str, str]:
        """Return what a launcher sets for this process."""
        if not self.launched:
            return {}
        return dict(zip(NAMES, map(str, (self.number, self.number, self.count, self.count))))

    def state(self) -> dict[str, Any]:
        """Return what accelerate's `PartialState` holds in this process."""
        from accelerate.state import DistributedType

        return {
            "_cpu": False,
            "backend": "nccl" if self.launched else None,
            "device": self.device,
            "debug": False,
            "distributed_type": DistributedType.MULTI_GPU if self.launched else DistributedType.NO,
            "num_processes": self.count,
            "process_index": self.number,
            "local_process_index": self.number,
            "fork_launched": False,
        }


@contextlib.contextmanager
def told_to_all(
    rank: Callable[[], Rank], set_device: Callable[[torch.device], None], variables: dict[str, str] | None = None
) -> Iterator[None]:
    """Inside, the script and its libraries see this rank; environment and accelerate's state are as before afterwards.

    Args:
        rank: asked once now for its variables, and when accelerate's state is first asked for: what a process sees of
            the node's devices may have changed by then.
        set_device: is given the rank's device when accelerate's state is first asked for.
        variables: of the environment; those of the launcher that are here, and CUDA_VISIBLE_DEVICES, go.
    """
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    def state(self: Any, cpu: bool = False, **options: Any) -> None:
        self.__dict__ = self._shared_state
        if not self._shared_state:
            now = rank()
            set_device(now.device)
            # not |=, which would also set the attribute: the state would hold itself
            self._shared_state.update(now.state())

    kept = {name: value for name, value in os.environ.items() if name not in (*NAMES, "CUDA_VISIBLE_DEVICES")}
    with (
        mock.patch.object(PartialState, "__init__", state),
        mock.patch.dict(PartialState._shared_state, clear=True),
        mock.patch.dict(AcceleratorState._shared_state, clear=True),
        mock.patch.dict(os.environ, kept | (variables or {}) | rank().variables(), clear=True),
    ):
        yield
