"""A node with GPUs that are not there, as the processes that a command starts on it see it.

What goes wrong: a script knows only what its process was given. `python train.py` is one process that sees every GPU;
`accelerate launch` starts one for each, with a number.

`started` reads a command with accelerate's and torch's own parsers; `process` is one of its processes: environment,
`torch.cuda` and accelerate's state are that process's, until the block ends. Tensors must be fake ones on `cuda`
devices (`simulate.place`): nothing is computed. No process group is there.

Sources: accelerate `commands.launch`; torch `distributed.run`.
"""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from failurelab.simulate.cuda import VISIBLE, Cuda, visible
from failurelab.simulate.rank import Rank, told_to_all

_PYTHON = ("python", "python3")


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


@contextlib.contextmanager
def process(what: Started, rank: int, gpus: int) -> Iterator[Cuda]:
    """Be one process of a command, while the block runs; all is as before afterwards.

    Args:
        what: from `started`.
        rank: which of its processes, from 0.
        gpus: of the node.
    """
    cuda = Cuda(gpus)

    def this() -> Rank:
        return Rank(rank, what.count, cuda.device_count(), launched=what.launched)

    with mock.patch.multiple(torch.cuda, **cuda.functions()), told_to_all(this, cuda.set_device, what.variables):
        yield cuda
