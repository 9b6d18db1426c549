"""A script that would start another process that trains: it is stopped, for that training would not be cut."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any
from unittest import mock

from failurelab_preflight.stage.own_code import OwnCode

_LAUNCHERS = ("python", "accelerate", "torchrun", "deepspeed", "pip", "uv", "conda", "ray")


class Stopped(BaseException):
    """The script would start another process that trains; the message names its command."""


@contextlib.contextmanager
def no_other_processes(own: OwnCode) -> Iterator[None]:
    """Inside, the script cannot start another Python or a launcher: what that trains would not be watched, nor cut."""
    import torch.multiprocessing

    popen, system = subprocess.Popen.__init__, os.system

    def refuse(args: Any) -> None:
        first = args if isinstance(args, (str, bytes, os.PathLike)) else next(iter(args), "")
        words = os.fsdecode(first).split()
        name = pathlib.Path(next((word for word in words if "=" not in word), "")).name
        if name.startswith(_LAUNCHERS) and own.asks():
            shown = args if isinstance(args, str) else " ".join(map(str, args))
            raise Stopped(
                f'starts another process, "{shown[:120]}", which preflight does not follow. Next: failurelab '
                "preflight of the script that it runs"
            )

    def start(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        refuse(args)
        popen(self, args, *rest, **options)

    def run(command: Any) -> int:
        refuse(command)
        return system(command)

    def spawn(function: Any, *_: Any, **__: Any) -> None:
        raise Stopped(
            f"spawns processes that run {getattr(function, '__name__', 'a function')}, which preflight does not "
            "follow. Next: a script that one process can run, started by torchrun or accelerate launch"
        )

    with (
        mock.patch.object(subprocess.Popen, "__init__", start),
        mock.patch.object(os, "system", run),
        mock.patch.object(torch.multiprocessing, "spawn", spawn),
        mock.patch.object(torch.multiprocessing, "start_processes", spawn),
    ):
        yield
