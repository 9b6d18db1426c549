"""A node with GPUs that are not there, as the processes that a command starts on it see it.

What goes wrong: a script knows only what its process was given. `python train.py` is one process that sees every GPU;
`accelerate launch` starts one for each, with a number. CUDA reads `CUDA_VISIBLE_DEVICES` when it is first used, not
when torch is imported, so that the variable may be set in a script, and may be set too late.

`started` reads a command with accelerate's and torch's own parsers; `process` is one of its processes: environment,
`torch.cuda` and accelerate's state are that process's, until the block ends. Tensors must be fake ones on `cuda`
devices (`simulate.place`): nothing is computed. No process group is there.

Sources: torch `cuda.device_count`; accelerate `PartialState`, `commands.launch`; torch `distributed.run`.
"""

import contextlib
import dataclasses
import os
import shlex
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PYTHON = ("python", "python3")
_KNOWN = (  # functions of torch.cuda that a process's `Cuda` answers
    "device_count",
    "is_available",
    "is_initialized",
    "current_device",
    "set_device",
    "get_device_properties",
    "get_device_name",
)


class CommandError(ValueError):
    """A command is none that this node can start; the message says which it can."""


@dataclasses.dataclass(frozen=True)
class Started:
    """What a command starts: `count` processes, numbered by a launcher or not, with these variables set."""

    count: int
    launched: bool
    variables: dict[str, str]


def started(command: str, gpus: int) -> Started:
    """Return what a command such as `CUDA_VISIBLE_DEVICES=0 python train.py` starts on a node with so many GPUs.

    Raises:
        CommandError: it is not python, accelerate launch or torchrun, or the launcher does not take its options.
    """
    try:
        words = shlex.split(command) if isinstance(command, str) else []
    except ValueError as error:
        raise CommandError(f"the command {command!r} cannot be read: {error}") from error
    variables: dict[str, str] = {}
    words = words[1:] if words[:1] == ["env"] else words
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, variables[name] = words.pop(0).partition("=")
    seen = visible(variables.get(VISIBLE), gpus)
    for launcher, parse in _LAUNCHERS.items():
        if words[: len(launcher)] == list(launcher):
            try:
                processes = parse(words[len(launcher) :], seen)
            except SystemExit as error:
                raise CommandError(f"{' '.join(launcher)} does not take the command {command!r}") from error
            return dataclasses.replace(processes, variables=variables | processes.variables)
    if words and os.path.basename(words[0]) in _PYTHON and "-m" not in words[:-1] and words[-1].endswith(".py"):
        return Started(1, False, variables)
    raise CommandError(
        f"the command {command!r} is none that this node starts. Next: python train.py, accelerate launch [options] "
        "train.py or torchrun [options] train.py, with variables such as CUDA_VISIBLE_DEVICES=0 before it"
    )


def _by_accelerate(words: list[str], seen: int) -> Started:
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(words)
    chosen = options.gpu_ids if options.gpu_ids not in (None, "all") else None
    seen = visible(chosen, seen)
    count = options.num_processes or seen
    # one process is started plainly, without a number: it is as if python had started it
    return Started(count, count > 1, {} if chosen is None else {VISIBLE: chosen})


def _by_torch(words: list[str], seen: int) -> Started:
    from torch.distributed.run import get_args_parser

    asked = get_args_parser().parse_args(words).nproc_per_node
    return Started(int(asked) if str(asked).isdigit() else seen, True, {})


_LAUNCHERS: dict[tuple[str, ...], Callable[[list[str], int], Started]] = {
    ("accelerate", "launch"): _by_accelerate,
    ("python", "-m", "accelerate.commands.launch"): _by_accelerate,
    ("torchrun",): _by_torch,
    ("python", "-m", "torch.distributed.run"): _by_torch,
}


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
    """What one process knows of the node's GPUs; `CUDA_VISIBLE_DEVICES` is read until the first use, as CUDA does."""

    def __init__(self, gpus: int) -> None:
        self.gpus, self.current = gpus, 0
        self._read: int | None = None

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
        self.current = index

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        """What nn.DataParallel asks for; all GPUs are alike."""
        self.use(0)
        return types.SimpleNamespace(name="simulated", total_memory=1, multi_processor_count=1)

    def get_device_name(self, device: Any = None) -> str:
        """As of torch.cuda; a first use."""
        return self.get_device_properties(device).name


@contextlib.contextmanager
def process(what: Started, rank: int, gpus: int) -> Iterator[Cuda]:
    """Be one process of a command, while the block runs; all is as before afterwards.

    Args:
        what: from `started`.
        rank: which of its processes, from 0.
        gpus: of the node.
    """
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, DistributedType

    cuda = Cuda(gpus)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": what.count, "LOCAL_WORLD_SIZE": what.count}
    variables = what.variables | ({name: str(number) for name, number in numbers.items()} if what.launched else {})

    def state(self: Any, cpu: bool = False, **options: Any) -> None:
        self.__dict__ = self._shared_state
        if self._shared_state:
            return
        cuda.set_device(rank)
        # not |=, which would also set the attribute: the state would hold itself
        self._shared_state.update(
            {
                "_cpu": False,
                "backend": "nccl" if what.launched else None,
                "device": torch.device("cuda", rank),
                "debug": False,
                "distributed_type": DistributedType.MULTI_GPU if what.launched else DistributedType.NO,
                "num_processes": what.count,
                "process_index": rank,
                "local_process_index": rank,
                "fork_launched": False,
            }
        )

    kept = {name: value for name, value in os.environ.items() if name not in (*numbers, VISIBLE)}
    with (
        mock.patch.multiple(torch.cuda, **{name: getattr(cuda, name) for name in _KNOWN}),
        mock.patch.object(PartialState, "__init__", state),
        mock.patch.dict(PartialState._shared_state, clear=True),
        mock.patch.dict(AcceleratorState._shared_state, clear=True),
        mock.patch.dict(os.environ, kept | variables, clear=True),
    ):
        yield cuda
