"""Rows of logits, read where they are multiplied: whoever computes them, the model's head, F.linear or `@`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_PRODUCTS = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "baddbmm", "einsum"}


class Products(TorchFunctionMode):
    """While it is entered, hands every product whose last dimension is the vocabulary to `note`.

    A hook on the head's module would miss a script that takes the head's weight and multiplies by itself.
    """

    def __init__(self, vocabulary: int, note: Callable[[torch.Tensor], None]):
        super().__init__()
        self._vocabulary, self._note = vocabulary, note

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if (
            getattr(func, "__name__", "") in _PRODUCTS
            and isinstance(output, torch.Tensor)
            and output.dim() > 1
            and output.shape[-1] == self._vocabulary
        ):
            self._note(output)
        return output
