"""A script that runs as one process sees itself as the last rank of its launch; libraries see the one process.

A device map that holds on every rank and one that holds on rank 0 alone look alike there. So what a script asks for its
rank (LOCAL_RANK, accelerate's PartialState, torch.cuda.current_device) is answered for the last rank, if the script's
own code asks; where a library asks, the answer is the truth.
"""

import contextlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_VARIABLES = {"LOCAL_RANK": -1, "RANK": -1, "WORLD_SIZE": 0, "LOCAL_WORLD_SIZE": 0}
_INDICES = ("local_process_index", "process_index")
_PASSED_THROUGH = (*_INDICES, "local_rank")  # properties that read another's


@contextlib.contextmanager
def seen_as_last(world_size: int) -> Iterator[None]:
    """Inside, the script's own code is told that it is the last of `world_size` ranks on one machine."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: _current(world_size)))
            stack.enter_context(mock.patch.object(torch.cuda, "set_device", lambda device: _SET.append(device)))
        if world_size > 1:
            stack.enter_context(_variables(world_size))
            stack.enter_context(_states(world_size))
        yield


_SET: list[Any] = []  # by the script, with torch.cuda.set_device


def knows_device() -> bool:
    """Whether this process knows by now which device is its own."""
    state = sys.modules.get("accelerate.state")
    return bool(_SET) or bool(state and state.PartialState._shared_state)


def read_map(device_map: Any, world_size: int) -> tuple[Any, bool]:
    """Return a call's device map as the last rank gives it, and whether it was made before a rank knew its device."""
    return device_map, world_size > 1 and not knows_device()


def _current(world_size: int) -> int:
    return world_size - 1 if knows_device() else 0


@contextlib.contextmanager
def _variables(world_size: int) -> Iterator[None]:
    environ, own = os.environ, type(os.environ)

    class Environment(own):
        def __getitem__(self, name: str) -> str:
            if name in _VARIABLES and _by_script():
                return str(world_size + _VARIABLES[name])
            return own.__getitem__(self, name)

        def __contains__(self, name: object) -> bool:
            return (name in _VARIABLES and _by_script()) or own.__contains__(self, name)

    environ.__class__ = Environment
    try:
        yield
    finally:
        environ.__class__ = own


@contextlib.contextmanager
def _states(world_size: int) -> Iterator[None]:
    if importlib.util.find_spec("accelerate") is None:
        yield
        return
    from accelerate.state import AcceleratorState, PartialState

    def index(name: str) -> property:
        def read(self: Any) -> int:
            return world_size - 1 if _by_script() else self.__dict__[name]

        return property(read, lambda self, value: self.__dict__.__setitem__(name, value))

    places = [(kind, name) for kind in (PartialState, AcceleratorState) for name in _INDICES]
    for kind, name in places:
        setattr(kind, name, index(name))
    try:
        yield
    finally:
        for kind, name in places:
            delattr(kind, name)


def _by_script() -> bool:
    """Whether the script's own code asks: the first frame that is neither a library's nor only passes a value on."""
    frame = sys._getframe(2)
    while frame is not None:
        name, code = frame.f_code.co_filename, frame.f_code.co_name
        through = code in _PASSED_THROUGH or name.startswith("<frozen") or name.endswith(("/os.py", "_abc.py"))
        if not through and name != __file__:
            return name == sys.argv[0] or not name.startswith((*_LIBRARIES, "<"))
        frame = frame.f_back
    return False
