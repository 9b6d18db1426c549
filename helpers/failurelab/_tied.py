"""A tied head: one weight in two hands, and one gradient, not two.

What goes wrong: where head and embedding are one tensor, the head makes a gradient as large as it, and the embedding
makes a second one, nearly all zeros, before autograd adds them: 148 MiB more in float32 for Qwen2's vocabulary at
width 256. Here the embedding hands over only the rows that were read, and they are added where they belong.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from failurelab._chunked import is_plain

_Rows = list[tuple[torch.Tensor, torch.Tensor]]  # ids, and the gradients of what was looked up for them


class _Shared(torch.autograd.Function):
    """One weight in two hands; adds to the head's gradient the rows that `_Lookup` noted."""

    @staticmethod
    def forward(ctx, weight, rows):
        ctx.rows, ctx.like = rows, weight
        ctx.set_materialize_grads(False)  # the embedding's hand brings none
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_head, _):
        # contiguous: one that autograd expanded from fewer numbers cannot be added to in place
        total = torch.zeros_like(ctx.like) if of_head is None else of_head.contiguous()
        while ctx.rows:
            _add(total, *ctx.rows.pop())
        return total, None


class _Lookup(torch.autograd.Function):
    """An embedding that notes its gradient in `rows`, and passes none on."""

    @staticmethod
    def forward(ctx, ids, weight, padding, rows):
        ctx.save_for_backward(ids)
        ctx.padding, ctx.rows = padding, rows
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (ids,) = ctx.saved_tensors
        ids, values = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding is not None:  # what nn.Embedding does with its padding_idx
            values = values.masked_fill((ids == ctx.padding)[:, None], 0)
        ctx.rows.append((ids, values))
        return None, None, None, None


def _add(total: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add rows to `total`, in place. A token may be there a thousand times: in bfloat16 most of its sum would be lost.

    So equal ids are summed in float32 first. How many different ones there are is never asked: a GPU would be waited
    for. Places that are left over repeat the last row, and write the same numbers to it.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    if total.dtype == wide:
        total.index_add_(0, ids, values.to(wide))
        return
    ids, order = ids.sort()
    group = torch.zeros_like(ids)
    group[1:] = (ids[1:] != ids[:-1]).cumsum(0)
    sums = torch.zeros(values.shape, dtype=wide, device=values.device).index_add_(0, group, values[order].to(wide))
    firsts = torch.zeros_like(ids).scatter_(0, group, ids)
    used = torch.arange(len(ids), device=ids.device).minimum(group[-1])
    firsts, sums = firsts[used], sums[used]
    total[firsts] = (total[firsts] + sums).to(total.dtype)


@contextlib.contextmanager
def shared_weight(head: nn.Module, embedding: nn.Module) -> Iterator[torch.Tensor | None]:
    """For a block, give the head's weight in a hand of its own where the embedding has the same (a tied head).

    Within the block the embedding is looked up so that its gradient holds only the rows that were read. Yields None,
    and changes nothing, where that does not apply. The embedding's `forward` is put back at the end.
    """
    applies = (
        is_plain(head)
        and type(embedding) is nn.Embedding
        and head.weight is embedding.weight
        and (type(head.weight) is nn.Parameter or hasattr(head.weight, "fake_mode"))  # or a simulated one
        # ZeRO-3 and FSDP fill a weight only while its own module runs.
        and not hasattr(head.weight, "ds_id")
        and head.weight.shape == (embedding.num_embeddings, embedding.embedding_dim)
        and head.weight.requires_grad
        and torch.is_grad_enabled()
        and not (embedding.sparse or embedding.max_norm or embedding.scale_grad_by_freq)
        and "forward" not in vars(embedding)
    )
    if not applies:
        yield None
        return
    rows: _Rows = []
    of_head, of_embedding = _Shared.apply(head.weight, rows)
    embedding.forward = lambda ids: _Lookup.apply(ids, of_embedding, embedding.padding_idx, rows)
    try:
        yield of_head
    finally:
        del embedding.forward
