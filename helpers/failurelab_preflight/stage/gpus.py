"""A script that demands a GPU, and ends by itself where there is none: it is told of as many as it wants.

Scripts that only ask take their own way for a CPU, so the first run tells the truth. Where that run ends in an error of
the script's own, after it has asked how many GPUs there are, the script alone is told that they are there; what it puts
on them is put on the CPU, as elsewhere (`simulate.no_gpu`).
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from failurelab_preflight.stage.own_code import OwnCode

_PASS_ON = ("is_torch_cuda_available", "is_torch_bf16_gpu_available", "is_cuda_available", "is_bf16_supported")
_DEMANDS = (AssertionError, RuntimeError, OSError, ValueError, SystemExit)


class Told:
    """What the script's own code is told of GPUs that are not here.

    Args:
        own: the script's code.
        count: of GPUs that it is told of; 0 tells the truth.

    Attributes:
        count: see above.
        asked: whether it has asked.
    """

    def __init__(self, own: OwnCode, count: int = 0):
        self._own, self.count, self.asked = own, count, False

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, the script is told so; where there is a GPU, nothing is otherwise."""
        if torch.cuda.is_available():
            yield
            return
        answers = {"is_available": bool(self.count), "device_count": self.count, "is_bf16_supported": True}
        with contextlib.ExitStack() as stack:
            for name, answer in answers.items():
                around = self._answer(getattr(torch.cuda, name), answer)
                stack.enter_context(mock.patch.object(torch.cuda, name, around))
            yield

    def _answer(self, original: Callable[..., Any], answer: Any) -> Callable[..., Any]:
        def asked(*args: Any, **options: Any) -> Any:
            if not self._own.asks(through=_PASS_ON, through_here=False):  # what is cut is cut for this machine
                return original(*args, **options)
            self.asked = True
            return answer if self.count else original(*args, **options)

        return asked

    def is_demanded(self, error: BaseException) -> bool:
        """Return whether an error is the script's own end after it has asked for GPUs, of which it was told none."""
        frames = traceback.extract_tb(error.__traceback__)
        return self.asked and isinstance(error, _DEMANDS) and bool(frames) and self._own.holds(frames[-1].filename)
