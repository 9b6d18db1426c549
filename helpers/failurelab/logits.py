"""Log-probabilities of completions: right, and without the logits of the whole sequence.

One renamed argument causes two failures (`num_logits_to_keep`, from transformers 4.49 on `logits_to_keep`). A Qwen2
that does not know the name it is given swallows it and returns logits for the whole sequence, prompt included.

- **Memory**: trl 0.15 with transformers 4.48 or older makes all rows, then cuts them itself. The numbers are right, and
  the logits take `sequence / completion` times the memory they need. Rows are cut, never the vocabulary.
- **Silence**: trl 0.14.0 with transformers 4.52 or newer does not cut. Every completion token is scored at a prompt
  position, without an error: see `check_alignment`.

Upstream: TRL #2683, #2770, #2773; transformers #35757, #37149.

`completion_logps` needs no such argument: for one call the model's head returns log-probabilities in place of logits.
So it runs through the model's own forward, with whatever wraps it (autocast, PEFT, DDP, checkpointing). The head makes
some rows of logits at a time, and again in backward, by torch's own checkpointing.
"""

import contextlib
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import checkpoint

from failurelab._text import dtype_name
from failurelab._unwrap import input_device, unwrap, vocabulary_size
from failurelab.handles import Handle, wrap_method
from failurelab.measure.alignment import Alignment, MisalignedLogProbs, check_alignment, probing

__all__ = ["Alignment", "MisalignedLogProbs", "check_alignment", "completion_logps", "keep_argument", "repair"]

NAMES = ("logits_to_keep", "num_logits_to_keep")
_ROWS = 64  # of logits held at once where nothing says how many: 37 MiB in float32 with Qwen2's vocabulary

_keeps: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def keep_argument(model: nn.Module) -> str | None:
    """Return the name by which this model is asked for its last rows of logits only.

    The name is read from the signature of the model's forward, never from a version. Some versions accept the keyword
    and ignore it, so a probe of a few tokens confirms it: the last rows must come back, and no others. A forward that
    was replaced by one that sends the argument itself refuses it (TypeError). The answer is cached for each model.

    Args:
        model: a causal language model, bare or wrapped (PEFT, DDP).

    Returns:
        `"logits_to_keep"`, `"num_logits_to_keep"`, or None if neither has an effect or can be sent.
    """
    base = unwrap(model)
    if base not in _keeps:
        parameters = inspect.signature(type(base).forward).parameters
        names = [name for name in NAMES if name in parameters]
        _keeps[base] = next((name for name in names if kept_rows(model, name) == "last"), None)
    return _keeps[base]


def kept_rows(model: nn.Module, name: str) -> str:
    """Ask a model for its last two rows of four by a name; return which come back: `last`, `all`, `other` or `none`.

    `other` are rows of other positions, as of a forward of one's own that cuts at the wrong end. `none` is a forward
    that refuses the name.
    """
    ids = torch.arange(4, device=input_device(model))[None] % vocabulary_size(model)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # as a trainer asks, for hooks of the script's
    with contextlib.suppress(TypeError), probing(model):
        some, every = (model(**batch, **options).logits for options in ({name: 2}, {}))  # (1, rows, vocabulary)
        if some.shape[1] >= every.shape[1]:
            return "all"
        if isinstance(some, FakeTensor):  # it has no values to compare
            return "last"
        starts = range(every.shape[1] - some.shape[1], -1, -1)  # the last first, for all may be alike
        apart = (every[:, start : start + some.shape[1]] - some for start in starts)
        far = [each.nan_to_num(nan=0.0).abs().max().item() for each in apart]  # words that are masked by -inf
        return "last" if far[0] == min(far) else "other"
    return "none"


def repair(model: nn.Module) -> Handle:
    """Let a model accept either name for its last rows of logits, so that a trainer's request has its effect.

    For a trainer whose scoring sits inside a method, such as trl 0.14.0's. The repair is on this one object and on deep
    copies of it. Call it before the trainer is made, so that a reference model that the trainer copies has it too.

    Args:
        model: a causal language model, bare or wrapped (PEFT, DDP).

    Returns:
        A handle; its `remove()` takes the repair back.

    Raises:
        ValueError: this model cannot be asked for fewer rows by either name.
    """
    accepted = keep_argument(model)
    if accepted is None:
        raise ValueError(
            f"model: {type(unwrap(model)).__name__} makes logits for the whole sequence whatever it is asked, so there "
            "is no name to pass on. Next: score with logits.completion_logps, which needs none."
        )
    (other,) = (name for name in NAMES if name != accepted)

    def rename(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rows = kwargs.pop(other, None)
        if rows is not None:
            kwargs.setdefault(accepted, rows)
        return forward(*args, **kwargs)

    return wrap_method(unwrap(model), "forward", rename, f"{other} is passed on as {accepted}")


def completion_logps(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    completion_length: int,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Return the log-probability of each completion token, differentiable, holding few rows of logits at a time.

    Args:
        model: a causal language model of transformers, bare or wrapped: its own forward runs, so PEFT (also on the
            head), DDP, FSDP, a ZeRO-3 engine, accelerate's mixed precision and gradient checkpointing work as they do.
        input_ids: prompts, then completions, `(batch, sequence)`; prompts padded on the left.
        attention_mask: of the same shape, 1 for a token, 0 for padding; None without padding. Tokens after a
            completion's end may be masked, or all of them, as trl does with `mask_truncated_completions`. They get a
            score too, a finite one, which the caller's own mask has to leave out.
        completion_length: how many of the last columns are completion.
        temperature: what the logits are divided by.
        chunk_size: how many rows of logits, one vocabulary wide, are made at once, in backward too; 64 by default. Some
            copies of them are held, and for a head that trains two gradients of its weight.

    Returns:
        `(batch, completion_length)`, float32 (float64 from a float64 model): at `[b, t]` the log-probability of
        completion token t of row b, given everything before it.

    Raises:
        ValueError: an argument does not fit (the message names it and its shape), or the model changes what its head
            returns (a final soft cap, a scale), so that scores would be wrong.
    """
    head = _head(model)
    _check_arguments(model, input_ids, attention_mask, completion_length, temperature, chunk_size)
    _check_logits_are_the_heads(model, head)
    completion = input_ids[:, -completion_length:]  # (batch, completion)
    own_forward, rows = head.forward, chunk_size or _ROWS

    def score(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`states` (rows, width), `ids` (rows) -> log-probabilities (rows)."""
        logits: torch.Tensor = own_forward(states)  # (rows, vocabulary)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        return wide.log_softmax(-1).gather(-1, ids[:, None])[:, 0]

    def score_instead(hidden: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities in the place of logits, with a vocabulary of one: (batch, completion, 1)."""
        states = hidden[:, -completion_length - 1 : -1]  # (batch, completion, width); each predicts the next token
        parts = zip(states.flatten(0, 1).split(rows), completion.to(states.device).flatten().split(rows))
        scored = [checkpoint(score, *part, use_reentrant=False) for part in parts]
        return torch.cat(scored).view(*completion.shape, 1)

    with mock.patch.object(head, "forward", score_instead):
        output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True)
    scores: torch.Tensor = output.logits
    if scores.shape != (*completion.shape, 1):
        raise ValueError(
            f"model: {type(unwrap(model)).__name__} returned {tuple(scores.shape)} where its head gave "
            f"{(*completion.shape, 1)}; scores would be wrong. Next: hand in the model as it was before torch.compile "
            "or another tool replaced its forward."
        )
    return scores[..., 0]


def _head(model: nn.Module) -> nn.Module:
    """Return the language-model head; refuse models that have none or whose forward cannot be used."""
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "model: nn.DataParallel copies the model at each call, so that its head cannot be reached. "
            "Next: one process per GPU (torchrun, accelerate launch)."
        )
    base = unwrap(model)
    kind = type(base).__name__
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"model: {kind} has an encoder; completion_length says nothing there. A decoder is wanted.")
    head: nn.Module | None = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        raise ValueError(
            f"model: {kind} has no LM head (get_output_embeddings() is None), so it gives tokens no probabilities. "
            "Next: load it with AutoModelForCausalLM, or hand in the model that this one wraps."
        )
    return head


def _check_logits_are_the_heads(model: nn.Module, head: nn.Module) -> None:
    """Let the head return known logits for two tokens, which the model must return unchanged; once for each model."""
    base = unwrap(model)
    if base in _checked or hasattr(head.weight, "fake_mode"):  # a simulated model has no logits to look at
        return
    width = getattr(head, "out_features", None) or vocabulary_size(model)
    known = torch.tensor([-96.0, -1.5, 0.25, 48.0]).repeat(math.ceil(width / 4))[:width]

    def return_known(hidden: torch.Tensor) -> torch.Tensor:
        return known.to(hidden).expand(*hidden.shape[:-1], width)  # (batch, tokens, vocabulary)

    ids = torch.zeros(1, 2, dtype=torch.long, device=input_device(model))
    with probing(model), mock.patch.object(head, "forward", return_known):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=True).logits
    if logits.shape[-1] != width or not (logits.float() == known.to(logits.device)).all():
        raise ValueError(
            f"model: {type(base).__name__} changes the logits after its head (a scale, a soft cap, a cut), so "
            "probabilities taken at the head would be wrong. Next: score with full logits there."
        )
    _checked.add(base)


def _check_arguments(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    completion_length: int,
    temperature: float,
    chunk_size: int | None,
) -> None:
    """Refuse what does not fit, with the argument and its shape."""
    if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
        raise ValueError(f"input_ids: token ids of shape (batch, sequence) are wanted, not {_describe(input_ids)}.")
    shape, length = tuple(input_ids.shape), input_ids.shape[1]
    if not isinstance(completion_length, int) or not 1 <= completion_length < length:
        raise ValueError(
            f"completion_length: {completion_length!r} does not fit input_ids of shape {shape}: 1 to {length - 1}, for "
            "at least one prompt token must come before the completion."
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature: a positive number is wanted, not {temperature!r}.")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size: rows of logits, at least 1, are wanted, not {chunk_size!r}.")
    if attention_mask is not None and tuple(attention_mask.shape) != shape:
        raise ValueError(f"attention_mask: {_describe(attention_mask)} does not match input_ids of shape {shape}.")
    if hasattr(input_ids, "fake_mode"):  # a simulated step: shapes without values
        return
    hides = torch.zeros(shape[0], dtype=torch.bool, device=input_ids.device)  # (batch)
    if attention_mask is not None:
        # From the last prompt column on, no 1 after a 0. A completion of nothing but 0 is one that trl leaves out.
        shown = attention_mask.bool()[:, -completion_length - 1 :]  # (batch, completion + 1)
        hides = (shown[:, 1:] & ~shown[:, :-1]).any(1).to(input_ids.device)
    # one question to a GPU, not three
    lowest, highest, hiding = torch.stack([input_ids.min(), input_ids.max(), hides.sum()]).tolist()
    if lowest < 0 or highest >= vocabulary_size(model):
        raise ValueError(
            f"input_ids: ids from {lowest} to {highest} in shape {shape}, and the vocabulary ends at "
            f"{vocabulary_size(model) - 1}. Next: replace label padding (-100) by the pad token, and mask it."
        )
    if hiding:
        raise ValueError(
            f"attention_mask: of shape {shape}, hides completion tokens in {hiding} of {shape[0]} rows, first in row "
            f"{hides.nonzero()[0].item()}: the last prompt column and the completion from its first token to its end "
            "must be 1, or the whole completion 0. Next: pad prompts on the left, completions on the right."
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}"
