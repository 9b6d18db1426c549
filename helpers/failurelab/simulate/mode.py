"""The fake tensor mode of the process: tensors with a shape, a dtype and a device, but without data."""

import functools

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@functools.cache
def fake() -> FakeTensorMode:
    """Return the process's fake tensor mode, a context manager; steps on simulated models run in it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(model: nn.Module) -> bool:
    """Whether a model's tensors are fake ones."""
    return any(isinstance(tensor, FakeTensor) for tensor in model.parameters())
