"""What a GPU's kernels keep and allocate, for a simulation that runs none of them.

What goes wrong: a simulated device has no kernels. torch decomposes what it can, and the memory is that of the parts.
Three things are corrected here: attention, operations that a CPU and a GPU compute in one kernel, and what kernels
allocate for the time of a call.

Temporary results of a CPU's kernels are not modelled: what a CPU holds while it multiplies bfloat16 depends on its
instructions and on the shape. A simulated step is comparable with one on a CPU in float32 alone.

Sources: FlashAttention-2 (arXiv 2307.08691) and torch's `flash_attn/flash_api.cpp`, `mha_bwd`; torch's `SoftMax.cu` and
`SoftMaxKernel.cpp`, which take a contiguous copy of what is not.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

_aten = torch.ops.aten
# Kernels that make their arguments contiguous first: which ones.
_COPIED = {
    _aten._log_softmax.default: (0,),
    _aten._softmax.default: (0,),
    _aten._log_softmax_backward_data.default: (0, 1),
    _aten._softmax_backward_data.default: (0, 1),
}
# Operations that torch decomposes for a device without kernels of its own, and that CPUs and GPUs have kernels for.
_WHOLE = ("silu_backward", "mish_backward", "native_channel_shuffle")
_library: torch.library.Library | None = None


def own_kernels() -> None:
    """Register kernels of `_WHOLE` for the simulated device type, for the rest of the process.

    Without them the backward of SiLU, in every Qwen2 and Llama layer, would hold three matrices more than on any real
    device. They are never run: fake tensors know the result's shape without them.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        for name in _WHOLE:
            _library.impl(name, _never, "PrivateUse1")


def _never(*_: Any) -> torch.Tensor:
    raise RuntimeError("a simulated device computes nothing: run this on fake tensors (simulate.fake)")


def workspace(function: Any, args: tuple[Any, ...]) -> Mapping[torch.device, int]:
    """Return the bytes that a GPU's kernel holds besides its results while it runs, by device.

    Args:
        function: the operation, as a dispatch mode sees it.
        args: its arguments.
    """
    tensors = [args[place] for place in _COPIED.get(function, ())]
    return {tensor.device: tensor.numel() * tensor.element_size() for tensor in tensors if not tensor.is_contiguous()}


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` keep what a GPU's fused kernel keeps, for the time of the block; no numbers.

    For fake tensors only: on real ones it would compute nothing, so that is an error.
    """

    def fused(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(query, "fake_mode"):
            raise ValueError("fused_attention stands in for a kernel on fake tensors, and these are real ones")
        return _Fused.apply(query, key, value)

    with mock.patch.object(functional, "scaled_dot_product_attention", fused):
        yield


class _Fused(torch.autograd.Function):
    """Shapes and what is kept of FlashAttention: inputs, output, and one float32 for each row of scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        _held_in_backward(query, key)
        return results


def _held_in_backward(query: torch.Tensor, key: torch.Tensor) -> None:
    """Allocate, and give back, what the backward kernel holds while it runs; shapes are (batch, heads, length, width).

    The query's gradient is summed in float32 over blocks of keys, with lengths rounded up to 128 and widths to 32; and
    where several heads share keys, each has a gradient of its own until they are summed.
    """
    batch, heads, length, width = query.shape
    long, wide = (-(-length // 128) * 128, -(-width // 32) * 32)
    held = [torch.empty(batch, heads, long, dtype=torch.float32, device=query.device)]
    if key.shape[2] > 128:
        held.append(torch.empty(batch, long, heads, wide, dtype=torch.float32, device=query.device))
    if key.shape[1] != heads:
        held += [torch.empty(batch, key.shape[2], heads, width, dtype=key.dtype, device=key.device) for _ in "kv"]
