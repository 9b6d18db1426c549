"""One real process of a launch, on a machine without the launch's GPUs: its ranks meet by gloo, on the CPU.

RANK, WORLD_SIZE and the others are the process's own (`preflight.session` sets them), so script and libraries see a
launch of as many processes as there are. What needs a card is mapped: `init_process_group("nccl")` starts gloo,
accelerate's state is that of a CPU, and a device of CUDA is the CPU (`simulate.no_gpu`). One thing is told to the
script's own code alone: accelerate's device, `cuda:LOCAL_RANK`, for a device map that holds on rank 0 and nowhere else
shows on the last rank only by the number that it names.

A call for which the others do not come ends in gloo's own error after a part of the time limit; what preflight does
itself meanwhile is waited for without such a call. (torch's comparison of what the ranks call, its debug level DETAIL,
ends DistributedDataParallel in a crash of torch 2.13.)
"""

import contextlib
import datetime
import importlib.util
import pathlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from failurelab.simulate.cuda import Cuda
from failurelab.simulate.no_gpu import Mapped, on_this_machine
from failurelab.simulate.rank import Rank
from failurelab_preflight.stage.own_code import OwnCode

_MANY = 1024  # GPUs: which of them are there, preflight cannot know
_PASS_ON = ("device",)  # properties that read another's
_PAUSE = 0.05  # seconds between two looks for another rank


class Launched:
    """This process, as the launch numbers it, and what it put on GPUs that are not here.

    Args:
        number: of this rank.
        count: of the ranks.
        folder: one that all ranks have, where they meet.
        visible: CUDA_VISIBLE_DEVICES of the launch.
        patience: seconds that a rank waits for the others in one call.
    """

    def __init__(self, number: int, count: int, folder: str = "", visible: str = "", patience: float = 60):
        # one GPU is named where a scheduler shows each process its own; more are those of the machine
        named = [device for device in visible.split(",") if device.strip() not in ("", "-1")]
        self.rank = Rank(number, count, 1 if len(named) == 1 else count, launched=count > 1)
        self.cuda = Cuda(_MANY, seen=_MANY)
        self.mapped = Mapped()
        self.has_engine = False  # of DeepSpeed, as the script or its launch asks for it
        self._folder, self._groups, self._met = pathlib.Path(folder), 0, 0
        self._patience = datetime.timedelta(seconds=patience)

    @contextlib.contextmanager
    def as_launched(self, own: OwnCode) -> Iterator[None]:
        """Inside, the script is that process of the launch."""
        with contextlib.ExitStack() as stack:
            if self.rank.launched or torch.cuda.device_count() < self.rank.count:
                stack.enter_context(on_this_machine(self.mapped, self.cuda))
            if self.rank.launched:
                stack.enter_context(self._by_gloo())
                stack.enter_context(self._state_of_rank(own))
            yield

    def too_early(self) -> bool:
        """Whether no process knows its device yet: `torch.cuda.current_device()` is 0 in each of them."""
        return self.rank.launched and not self.cuda.chosen

    def meet(self) -> None:
        """Wait for the other ranks to come here too, by a call of all: one that is in another call ends in an error."""
        import torch.distributed as dist

        if self.rank.launched and dist.is_initialized():
            here = torch.zeros(7, 3, dtype=torch.int32, device="cpu")  # of a shape that no other call has
            dist.all_gather([torch.empty_like(here) for _ in range(self.rank.count)], here)

    def follow(self) -> None:
        """Wait until rank 0 has come here too, however long it takes; nothing is sent."""
        self._met += 1
        here = self._folder / f"met-{self._met}"
        if self.rank.number == 0:
            here.touch()
        while self.rank.launched and not here.exists():
            time.sleep(_PAUSE)

    @contextlib.contextmanager
    def _by_gloo(self) -> Iterator[None]:
        """Inside, a process group is one of gloo on the CPU, whose ranks meet in a file and wait as long as is told."""
        import torch.distributed as dist

        start, barrier = dist.init_process_group, dist.barrier

        def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
            if backend not in (None, "gloo"):
                self.mapped.tell(f"backend {backend}", "gloo")
            self._groups += 1
            store = dist.FileStore(str(self._folder / f"group-{self._groups}"), self.rank.count)
            timeout = min(options.get("timeout") or self._patience, self._patience)
            start("gloo", store=store, rank=self.rank.number, world_size=self.rank.count, timeout=timeout)

        def all_arrive(*args: Any, device_ids: Any = None, **options: Any) -> Any:
            return barrier(*args, **options)  # gloo takes no device's number

        kind = torch.nn.parallel.DistributedDataParallel
        read = kind.__getattr__

        def read_through(model: Any, name: str) -> Any:  # as DeepSpeed's engine does, in whose place it is
            try:
                return read(model, name)
            except AttributeError:
                if not self.has_engine or name == "module":
                    raise
                return getattr(model.module, name)

        with (
            mock.patch.multiple(dist, init_process_group=init_process_group, barrier=all_arrive),
            mock.patch.object(kind, "__getattr__", read_through),
        ):
            yield

    @contextlib.contextmanager
    def _state_of_rank(self, own: OwnCode) -> Iterator[None]:
        """Inside, accelerate's state is that of a CPU, and its device is the launch's for the script's own code."""
        if importlib.util.find_spec("accelerate") is None:
            yield
            return
        from accelerate.state import AcceleratorState, PartialState

        original, of_rank, answered = PartialState.__init__, self.rank.device, False

        def on_cpu(state: Any, cpu: bool = False, **options: Any) -> None:
            nonlocal answered
            original(state, cpu=True, **{name: value for name, value in options.items() if name != "backend"})
            if not answered:
                answered = True
                self.cuda.set_device(of_rank)

        def read(state: Any) -> Any:
            if own.asks(_PASS_ON):
                return of_rank
            values = state.__dict__
            return values["device"] if "device" in values else state.__getattr__("device")  # accelerate's own error

        device = property(read, lambda state, value: state.__dict__.__setitem__("device", value))
        for kind in (PartialState, AcceleratorState):
            kind.device = device
        try:
            with mock.patch.object(PartialState, "__init__", on_cpu):
                yield
        finally:
            for kind in (PartialState, AcceleratorState):
                del kind.device
