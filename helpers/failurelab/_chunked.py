"""Log-probabilities of given tokens from hidden states, without ever holding the logits of all of them.

What goes wrong: a language-model head turns a hidden state of a few thousand numbers into one logit for each word of
the vocabulary, 151,936 for Qwen2. Kept for backward, in float32, the logits of 1,000 tokens are 580 MiB, and
`log_softmax` and its gradient hold as much again each.

What is needed is one number a token. So the vocabulary is walked in slices: forward keeps a running log-sum-exp,
backward computes each slice of logits once more, and takes from it the slice of the head's gradient and what it adds
to the gradient of the hidden states. A slice of the weight's gradient is finished when its slice is: nothing is summed
over slices but the hidden states' gradient, which is small, and kept in float32. No step in the loop waits for a GPU:
which slice a token lies in is a mask, never a question that Python asks of a value.

The running log-sum-exp is that of Milakov and Gimelshein (arXiv 1805.02867); computing logits again in backward is what
Cut Cross-Entropy (arXiv 2411.09009) does on a GPU.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MIB = 2**20


def default_rows(
    tokens: int, vocabulary: int, width: int, device: str | torch.device, card_bytes: int | None = None
) -> int:
    """Return how many rows of logits, one vocabulary wide, are held at once where the caller does not say; at least 1.

    On a CPU as many as 19 MiB of float32 hold, 32 for Qwen2's vocabulary: fewer save little more, beside the model's
    activations, and cost time as soon as other work has the cores (measured). On a GPU a slice must keep the card busy:
    64 MiB are 512 tiles of 128 x 256 for 108 to 132 multiprocessors, and cards with more memory get up to 256 MiB, a
    512th of theirs, so that the launches of kernels cost less beside them. And each slice reads and writes the hidden
    states and their gradient, so that it should be no narrower than they are, where that is more. The figures for a GPU
    are reasoned, not measured.

    Args:
        tokens: that are scored in one call.
        vocabulary: logits in a row.
        width: of a hidden state.
        device: where it is computed.
        card_bytes: the memory of the card; asked of torch by default.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return max(1, 19 * MIB // (4 * vocabulary))
    if card_bytes is None:
        card_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    held = max(min(max(card_bytes // 512, 64 * MIB), 256 * MIB), 4 * tokens * width)
    return max(1, held // (4 * vocabulary))


def slice_width(rows: int, tokens: int, vocabulary: int) -> int:
    """Return how many columns of logits, for all tokens, make up `rows` rows of the whole vocabulary.

    Slices are of equal width, but for the last; wide ones end at a multiple of 64, at which the kernels of a GPU are
    fastest, and so may hold up to 63 columns more than asked for.
    """
    asked = min(vocabulary, max(1, rows * vocabulary // max(1, tokens)))
    equal = -(-vocabulary // -(-vocabulary // asked))
    return equal if equal < 1024 else -(-equal // 64) * 64


class _TokenLogProbs(torch.autograd.Function):
    """`hidden` (tokens, width), `weight` (vocabulary, width), `tokens` (tokens) -> log-probabilities (tokens)."""

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, rows):
        width = slice_width(rows, hidden.shape[0], weight.shape[0])
        dtype = _compute_dtype(hidden)
        states = hidden.to(dtype)
        highest = states.new_full(tokens.shape, -torch.inf, dtype=_wide(dtype))
        total = torch.zeros_like(highest)
        chosen = torch.zeros_like(highest)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, weight.shape[0], width):
                logits = _slice(states, weight[start : start + width], temperature)
                place, inside = _place(tokens, start, logits)
                chosen += logits.gather(1, place)[:, 0].where(inside, 0)
                higher = torch.maximum(highest, logits.amax(1))
                total = total * (highest - higher).exp() + logits.sub_(higher[:, None]).exp_().sum(1)
                highest = higher
                del logits  # or two slices would be held while the next is made
        log_total = highest + total.log()
        scores = chosen - log_total
        ctx.save_for_backward(hidden, weight, tokens, log_total, scores)
        ctx.temperature, ctx.width, ctx.dtype = temperature, width, dtype
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight, tokens, log_total, scores = ctx.saved_tensors
        states = hidden.to(ctx.dtype)
        by_logit = (gradient / ctx.temperature).to(log_total.dtype)
        # A token's own logit changes by one less its probability, any other by minus its probability. The own part
        # stays in float32: summed up with the rest in bfloat16, slice by slice, it would lose digits.
        own = -torch.expm1(scores) * by_logit
        for_hidden = own[:, None] * weight[tokens].to(own.dtype) if ctx.needs_input_grad[0] else None
        for_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, weight.shape[0], ctx.width):
                part = weight[start : start + ctx.width].to(ctx.dtype)
                change = _slice(states, part, ctx.temperature).sub_(log_total[:, None]).exp_().mul_(-by_logit[:, None])
                place, inside = _place(tokens, start, change)
                change.scatter_(1, place, change.gather(1, place).masked_fill(inside[:, None], 0))
                change = change.to(ctx.dtype)
                if for_hidden is not None:
                    _add_product(for_hidden, change, part)
                if for_weight is not None:
                    change.scatter_add_(1, place, own.where(inside, 0)[:, None].to(ctx.dtype))
                    target = for_weight[start : start + ctx.width]
                    if target.dtype == ctx.dtype:
                        torch.mm(change.T, states, out=target)
                    else:
                        target.copy_(_product(change.T, states, target.dtype))
                del change, part
        return None if for_hidden is None else for_hidden.to(hidden.dtype), for_weight, None, None, None


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the type that `torch.nn.functional.linear` would multiply in here, autocast regarded."""
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _slice(states: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return one slice of the logits, in float32 or wider, as a tensor of its own."""
    logits = _product(states, weight.to(states.dtype).T, _wide(states.dtype))
    return logits if temperature == 1 else logits.div_(temperature)


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix product in `dtype`; from half precision without rounding in between, where the device can."""
    if left.dtype == dtype:
        return left @ right
    if left.device.type != "cpu" and _widens(left.device.type, left.dtype, dtype):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _add_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if target.dtype == left.dtype:
        target.addmm_(left, right)
    else:
        target += _product(left, right, target.dtype)


@functools.cache
def _widens(device: str, dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """Whether `torch.mm` takes `out_dtype` here, asked once of a small product: torch from 2.8 on, on a GPU."""
    small = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        return torch.mm(small, small, out_dtype=out_dtype).dtype == out_dtype
    except (TypeError, RuntimeError):  # NotImplementedError is one
        return False


def _place(tokens: torch.Tensor, start: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's column in this slice, (tokens, 1), kept within it, and whether it lies there, (tokens)."""
    column = tokens - start
    inside = (column >= 0) & (column < logits.shape[1])
    return column.clamp(0, logits.shape[1] - 1)[:, None], inside


def is_plain(head: nn.Module) -> bool:
    """Whether the head does nothing but multiply by its weight: an `nn.Linear` without bias, hooks or adapters."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and "forward" not in vars(head)
        and not head._forward_hooks
        and not head._forward_pre_hooks
    )


def token_logps(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, temperature: float, rows: int
) -> torch.Tensor:
    """Return the log-probability of each token under a plain head, differentiable.

    Args:
        hidden: the states that predict the tokens, `(..., width)`.
        weight: the head's weight, `(vocabulary, width)`.
        tokens: which token each state predicts, `(...)`, each within the vocabulary.
        temperature: what logits are divided by.
        rows: how many rows of logits, one vocabulary wide, may be held; so many numbers are held in another shape, all
            tokens by a slice of the vocabulary.

    Returns:
        Shape `(...)`, float32, or float64 for float64 states.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _TokenLogProbs.apply(flat, weight, tokens.reshape(-1), temperature, rows).view(tokens.shape)


def token_logps_by_parts(
    project: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    rows: int,
) -> torch.Tensor:
    """Return the same for any head: `project` makes logits of `rows` states at a time, and once more in backward."""

    def some(states, ids):
        logits = project(states)
        return F.log_softmax(logits.to(_wide(logits.dtype)) / temperature, -1).gather(1, ids[:, None])[:, 0]

    parts = zip(hidden.reshape(-1, hidden.shape[-1]).split(rows), tokens.reshape(-1).split(rows))
    return torch.cat([checkpoint(some, *part, use_reentrant=False) for part in parts]).view(tokens.shape)
