"""Log-probabilities of given tokens from hidden states, without ever holding the logits of all of them.

What goes wrong: a language-model head turns a hidden state of a few thousand numbers into one logit for each word of
the vocabulary, 151,936 for Qwen2. Kept for backward, in float32, the logits of 1,000 tokens are 580 MiB, and
`log_softmax` and its gradient hold as much again each.

What is needed is one number a token. So the vocabulary is processed in slices: forward keeps a running log-sum-exp,
backward computes each slice of logits once more, and takes from it the slice of the head's gradient and what it adds
to the gradient of the hidden states. Each slice of the weight's gradient is final at once: only the gradient of the
hidden states is summed over slices, which is small, and kept in float32. No step in the loop waits for a GPU: a mask
says which slice a token lies in, so Python never asks for a value.

A tied head needs more care. Where head and embedding are one tensor, the head makes a gradient as large as it, and the
embedding makes a second one, nearly all zeros, before autograd adds them: 148 MiB more in float32 for Qwen2's
vocabulary at width 256. `share_weight` lets the embedding pass on only the rows that were read, and adds them where
they belong.

The running log-sum-exp is that of Milakov and Gimelshein (arXiv 1805.02867); computing logits again in backward is what
Cut Cross-Entropy (arXiv 2411.09009) does on a GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MIB = 2**20


def default_rows(
    tokens: int, vocabulary: int, width: int, device: str | torch.device, card_bytes: int | None = None
) -> int:
    """Return the default number of rows of logits, one vocabulary wide, that are held at once; at least 1.

    On a CPU as many as 19 MiB of float32 hold, 32 for Qwen2's vocabulary: fewer save little beside the model's
    activations, and cost time as soon as other work has the cores (measured). On a GPU a slice must keep the card busy:
    64 MiB are 512 tiles of 128 x 256 for 108 to 132 multiprocessors, and cards with more memory get a 512th of it, up
    to 256 MiB, so that launches of kernels cost less in comparison. Each slice also reads and writes the hidden states
    and their gradient, so it should be no smaller than they are. The figures for a GPU are reasoned, not measured.

    Args:
        tokens: how many are scored in one call.
        vocabulary: logits in a row.
        width: of a hidden state.
        device: where it is computed.
        card_bytes: the memory of the card; by default torch is asked.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return max(1, 19 * MIB // (4 * vocabulary))
    if card_bytes is None:
        card_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    held = max(min(max(card_bytes // 512, 64 * MIB), 256 * MIB), 4 * tokens * width)
    return max(1, held // (4 * vocabulary))


def slice_width(rows: int, tokens: int, vocabulary: int) -> int:
    """Return how many columns of logits, for all tokens, hold as many numbers as `rows` rows of the whole vocabulary.

    All slices but the last are of equal width. A wide one is a multiple of 64 columns, at which the kernels of a GPU
    are fastest, and so may have up to 63 more than asked for.
    """
    asked = min(vocabulary, max(1, rows * vocabulary // max(1, tokens)))
    equal = -(-vocabulary // -(-vocabulary // asked))
    return equal if equal < 1024 else -(-equal // 64) * 64


class _TokenLogProbs(torch.autograd.Function):
    """`hidden` (tokens, width), `weight` (vocabulary, width), `ids` (tokens) -> log-probabilities (tokens)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float, rows: int
    ) -> torch.Tensor:
        width = slice_width(rows, hidden.shape[0], weight.shape[0])
        dtype = _compute_dtype(hidden)
        states = hidden.to(dtype)
        highest = states.new_full(ids.shape, -torch.inf, dtype=_widen(dtype))  # (tokens), as total and chosen
        total = torch.zeros_like(highest)
        chosen = torch.zeros_like(highest)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, weight.shape[0], width):
                logits = _slice_logits(states, weight[start : start + width], temperature)  # (tokens, slice)
                column, inside = _locate(ids, start, logits)
                chosen += logits.gather(1, column)[:, 0].where(inside, 0)
                new_highest = torch.maximum(highest, logits.amax(1))
                total = total * (highest - new_highest).exp() + logits.sub_(new_highest[:, None]).exp_().sum(1)
                highest = new_highest
                del logits  # or two slices would be held while the next is made
        log_total = highest + total.log()
        scores = chosen - log_total
        ctx.save_for_backward(hidden, weight, ids, log_total, scores)
        ctx.temperature, ctx.width, ctx.dtype = temperature, width, dtype
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, ids, log_total, scores = ctx.saved_tensors
        states = hidden.to(ctx.dtype)
        by_logit = (gradient / ctx.temperature).to(log_total.dtype)  # (tokens)
        # A token's own logit gets 1 minus its probability, any other logit minus its probability. The own part stays in
        # float32: summed with the rest in bfloat16, slice by slice, it would lose digits.
        own = -torch.expm1(scores) * by_logit  # (tokens)
        for_hidden = own[:, None] * weight[ids].to(own.dtype) if ctx.needs_input_grad[0] else None  # (tokens, width)
        for_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # (vocabulary, width)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, weight.shape[0], ctx.width):
                part = weight[start : start + ctx.width].to(ctx.dtype)  # (slice, width)
                by_slice = _slice_logits(states, part, ctx.temperature)  # (tokens, slice): logits, then their gradient
                by_slice.sub_(log_total[:, None]).exp_().mul_(-by_logit[:, None])
                column, inside = _locate(ids, start, by_slice)
                by_slice.scatter_(1, column, by_slice.gather(1, column).masked_fill(inside[:, None], 0))
                by_slice = by_slice.to(ctx.dtype)
                if for_hidden is not None:
                    _add_product(for_hidden, by_slice, part)
                if for_weight is not None:
                    by_slice.scatter_add_(1, column, own.where(inside, 0)[:, None].to(ctx.dtype))
                    target = for_weight[start : start + ctx.width]
                    if target.dtype == ctx.dtype:
                        torch.mm(by_slice.T, states, out=target)
                    else:
                        target.copy_(_multiply(by_slice.T, states, target.dtype))
                del by_slice, part
        return None if for_hidden is None else for_hidden.to(hidden.dtype), for_weight, None, None, None


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype that `torch.nn.functional.linear` would multiply in here, under autocast too."""
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _slice_logits(states: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return one slice of the logits, in float32 or wider, as a tensor of its own."""
    logits = _multiply(states, weight.to(states.dtype).T, _widen(states.dtype))
    return logits if temperature == 1 else logits.div_(temperature)


def _multiply(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix product in `dtype`; from half precision without rounding in between, where the device can."""
    if left.dtype == dtype:
        return left @ right
    if left.device.type != "cpu" and _can_widen(left.device.type, left.dtype, dtype):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _add_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if target.dtype == left.dtype:
        target.addmm_(left, right)
    else:
        target += _multiply(left, right, target.dtype)


@functools.cache
def _can_widen(device: str, dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """Whether `torch.mm` takes `out_dtype` here, asked once of a small product: torch from 2.8 on, on a GPU."""
    small = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        return torch.mm(small, small, out_dtype=out_dtype).dtype == out_dtype
    except (TypeError, RuntimeError):  # NotImplementedError is one
        return False


def _locate(ids: torch.Tensor, start: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's column in this slice, (tokens, 1), kept within it, and whether it lies there, (tokens)."""
    column = ids - start
    inside = (column >= 0) & (column < logits.shape[1])
    return column.clamp(0, logits.shape[1] - 1)[:, None], inside


def is_plain(head: nn.Module) -> bool:
    """Whether the head only multiplies by its weight: an `nn.Linear` without bias, hooks or adapters."""
    hooks = head._forward_hooks or head._forward_pre_hooks
    return type(head) is nn.Linear and head.bias is None and "forward" not in vars(head) and not hooks


def token_logps(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, temperature: float, rows: int
) -> torch.Tensor:
    """Return the log-probability of each token under a plain head, differentiable.

    Args:
        hidden: the states that predict the tokens, `(..., width)`.
        weight: the head's weight, `(vocabulary, width)`.
        tokens: which token each state predicts, `(...)`, each within the vocabulary.
        temperature: what logits are divided by.
        rows: how many rows of logits, one vocabulary wide, may be held; as many numbers are held in another shape, all
            tokens by a slice of the vocabulary.

    Returns:
        Shape `(...)`, float32, or float64 for float64 states.
    """
    states = hidden.reshape(-1, hidden.shape[-1])  # (tokens, width)
    return _TokenLogProbs.apply(states, weight, tokens.reshape(-1), temperature, rows).view(tokens.shape)


def token_logps_by_parts(
    project: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    rows: int,
) -> torch.Tensor:
    """Return the same for any head: `project` makes logits of `rows` states at a time, and once more in backward."""

    def score(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits = project(states)  # (rows, vocabulary)
        return F.log_softmax(logits.to(_widen(logits.dtype)) / temperature, -1).gather(1, ids[:, None])[:, 0]

    parts = zip(hidden.reshape(-1, hidden.shape[-1]).split(rows), tokens.reshape(-1).split(rows))
    return torch.cat([checkpoint(score, *part, use_reentrant=False) for part in parts]).view(tokens.shape)


# Ids, and the gradients of what was looked up for them: (ids), (ids, width).
_Rows = list[tuple[torch.Tensor, torch.Tensor]]


class _Shared(torch.autograd.Function):
    """One weight as two tensors, for the head and for the embedding; adds the rows of `_Lookup` to the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.rows, ctx.weight = rows, weight
        ctx.set_materialize_grads(False)  # the embedding's tensor gets no gradient
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_head: torch.Tensor | None, _: None) -> tuple[torch.Tensor, None]:
        # contiguous: one that autograd expanded from fewer numbers cannot be added to in place
        total = torch.zeros_like(ctx.weight) if of_head is None else of_head.contiguous()
        while ctx.rows:
            _add_rows(total, *ctx.rows.pop())
        return total, None


class _Lookup(torch.autograd.Function):
    """An embedding that appends its gradient to `rows` instead of passing it on."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int | None, rows: _Rows) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.rows = padding, rows
        return F.embedding(ids, weight)  # (batch, tokens, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ids, values = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding is not None:  # what nn.Embedding does with its padding_idx
            values = values.masked_fill((ids == ctx.padding)[:, None], 0)
        ctx.rows.append((ids, values))
        return None, None, None, None


def _add_rows(total: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values` (ids, width) to the rows `ids` of `total` (vocabulary, width), in place.

    A token may occur a thousand times: in bfloat16 most of its sum would be lost, so equal ids are summed in float32
    first. Their number is never asked for, because a GPU would have to be waited for: places that are left over repeat
    the last row, and write the same numbers to it.
    """
    wide = _widen(values.dtype)
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
def share_weight(head: nn.Module, embedding: nn.Module) -> Iterator[torch.Tensor | None]:
    """For a block, yield a tensor for the head's weight if the embedding has the same weight (a tied head).

    Within the block the embedding's gradient holds only the rows that were read. Yields None, and changes nothing, if
    the head is not tied or this cannot be done. The embedding's `forward` is put back at the end.
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

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        return _Lookup.apply(ids, of_embedding, embedding.padding_idx, rows)

    with mock.patch.object(embedding, "forward", look_up):
        yield of_head
