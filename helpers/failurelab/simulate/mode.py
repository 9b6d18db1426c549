"""The fake tensor mode of the process: tensors with a shape, a dtype and a device, but without data."""

import functools

from torch._subclasses.fake_tensor import FakeTensorMode


@functools.cache
def fake() -> FakeTensorMode:
    """Return the process's fake tensor mode, a context manager; steps on simulated models run in it."""
    return FakeTensorMode(allow_non_fake_inputs=True)
