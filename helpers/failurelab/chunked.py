"""Log-probabilities of given tokens from hidden states, without ever holding the logits of all of them.

What goes wrong: a language-model head turns a hidden state of a few thousand numbers into one logit for each word of
the vocabulary, 151,936 for Qwen2. Kept for backward, in float32, the logits of 1,000 tokens are 580 MiB, and
`log_softmax` and its gradient hold as much again each.

What is needed is one number a token. So the vocabulary is walked in slices: forward keeps a running log-sum-exp,
backward computes each slice of logits once more, and takes from it the slice of the head's gradient and what it adds
to the gradient of the hidden states. A slice of the weight's gradient is finished when its slice is: nothing is summed
over slices but the hidden states' gradient, which is small, and kept in float32.

The running log-sum-exp is that of Milakov and Gimelshein (arXiv 1805.02867); computing logits again in backward is what
Cut Cross-Entropy (arXiv 2411.09009) does on a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


class _TokenLogProbs(torch.autograd.Function):
    """`hidden` (tokens, width), `weight` (vocabulary, width), `tokens` (tokens) -> log-probabilities (tokens)."""

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, rows):
        width = max(1, rows * weight.shape[0] // max(1, hidden.shape[0]))
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
                if for_hidden is not None:
                    for_hidden += change.to(ctx.dtype) @ part
                if for_weight is not None:
                    change = change.scatter_add_(1, place, own.where(inside, 0)[:, None]).to(ctx.dtype)
                    target = for_weight[start : start + ctx.width]
                    same = target.dtype == ctx.dtype
                    torch.mm(change.T, states, out=target) if same else target.copy_(change.T @ states)
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
    logits = states @ weight.to(states.dtype).T
    logits = logits.to(_wide(logits.dtype))
    return logits if temperature == 1 else logits.div_(temperature)


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


class _Shared(torch.autograd.Function):
    """One weight in two hands, the head's and the embedding's; adds their gradients without a second whole one."""

    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_head, of_embedding):
        of_embedding = of_embedding.detach()
        ids, values = of_embedding._indices()[0], of_embedding._values()
        seen, which = ids.unique(return_inverse=True)
        # A prompt may hold one token a thousand times; in bfloat16 their sum would lose most of them.
        sums = torch.zeros(len(seen), values.shape[1], dtype=_wide(values.dtype), device=values.device)
        sums.index_add_(0, which, values.to(sums.dtype))
        of_head[seen] = (of_head[seen] + sums).to(of_head.dtype)
        return of_head


@contextlib.contextmanager
def shared_weight(head: nn.Module, embedding: nn.Module) -> Iterator[torch.Tensor | None]:
    """For a block, give the head's weight in a hand of its own where the embedding has the same (a tied head).

    A tied weight gets a gradient as large as itself from the head, and a second one, nearly all zeros, from the
    embedding, before autograd adds them: 148 MiB more for Qwen2's vocabulary at width 256. Within the block the
    embedding is looked up so that its gradient holds only the rows that were read. Yields None, and changes nothing,
    where that does not apply. The embedding's `forward` is put back at the end.
    """
    applies = (
        is_plain(head)
        and type(embedding) is nn.Embedding
        and head.weight is embedding.weight
        and type(head.weight) is nn.Parameter
        and head.weight.device.type in ("cpu", "cuda")  # others lack sparse gradients
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
    of_head, of_embedding = _Shared.apply(head.weight)
    embedding.forward = lambda ids: F.embedding(ids, of_embedding, embedding.padding_idx, sparse=True)
    try:
        yield of_head
    finally:
        del embedding.forward
