"""The machine that a script is launched on: it is the last rank there, and the GPUs are not here.

A device map that holds on every rank and one that holds on rank 0 alone look alike on rank 0. So what a script asks for
its rank (LOCAL_RANK, accelerate's PartialState, torch.cuda.current_device) is answered for the last rank, if the
script's own code asks; where a library asks, the answer is the truth. What is put on a GPU that is not here is put on
the CPU.
"""

import contextlib
import os
from collections.abc import Iterator

import torch

from failurelab.preflight.intercept.own_code import OwnCode
from failurelab.simulate.cuda import VISIBLE, Cuda
from failurelab.simulate.no_gpu import Mapped, on_this_machine
from failurelab.simulate.rank import Rank, told_to_script

_MANY = 1024  # GPUs: which of them are there, preflight cannot know


class Launched:
    """The last rank of a launch of `world_size` processes on one machine, and what it put on GPUs that are not here."""

    def __init__(self, world_size: int):
        # one GPU is named where a scheduler shows each process its own; more are those of the machine
        devices = 1 if _named_gpus() == 1 else world_size
        self.rank = Rank(world_size - 1, world_size, devices, launched=world_size > 1)
        self.cuda = Cuda(_MANY, seen=_MANY)
        self.mapped = Mapped()

    @contextlib.contextmanager
    def seen(self, own: OwnCode) -> Iterator[None]:
        """Inside, the script's own code sees that machine."""
        with contextlib.ExitStack() as stack:
            if torch.cuda.device_count() < self.rank.count:
                stack.enter_context(on_this_machine(self.mapped, self.cuda))
            if self.rank.launched:
                stack.enter_context(told_to_script(self.rank, own.asks, self.cuda.set_device))
            yield

    def too_early(self) -> bool:
        """Whether no process knows its device yet: `torch.cuda.current_device()` is 0 in each of them."""
        return self.rank.launched and not self.cuda.chosen


def _named_gpus() -> int:
    """Return how many GPUs CUDA_VISIBLE_DEVICES names."""
    said = os.environ.get(VISIBLE, "")
    return len([device for device in said.split(",") if device.strip() not in ("", "-1")])
