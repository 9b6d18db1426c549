"""Log-probabilities by the definition: a plain forward pass of the policy, and the softmax of its logits.

Nothing of a trainer's forward pass is used: no patched `forward`, no autocast, no dropout, no checkpointing, no padding
on the left. The weights are the trainer's own, with their adapters and their quantization.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn

from failurelab._unwrap import input_device, unwrap, vocabulary_size
from failurelab.handles import keep_modes, unseen
from failurelab.textbook import reading
from failurelab.textbook.definition import log_distribution
from failurelab.textbook.rows import Layout, Row, Scoring, lay_out


@dataclasses.dataclass
class Scores:
    """Scores of a few rows, each padded to the longest with zeros.

    Attributes:
        logps: log-probabilities of the scored tokens, (rows, tokens).
        entropies: of the distributions that they were drawn from, (rows, tokens); (0,) where not asked for.
        mask: where there is a token that is trained on, (rows, tokens).
    """

    logps: torch.Tensor
    entropies: torch.Tensor
    mask: torch.Tensor


def score(
    forward: Callable[..., torch.Tensor], rows: Sequence[Row], scoring: Scoring, *, entropy: bool = False
) -> Scores:
    """Score the completions of a few rows.

    Args:
        forward: takes ids and attention mask (rows, length) as lists of lists, how many of the last places are needed,
            and what else the model is given, by name; returns logits (rows, length or that many, words).
        rows: what is scored.
        scoring: how.
        entropy: whether the entropies are needed too.
    """
    layouts = [lay_out(row, scoring) for row in rows]
    length, tokens = max(len(layout.ids) for layout in layouts), max(len(layout.places) for layout in layouts)
    ids = [layout.ids + [scoring.pad] * (length - len(layout.ids)) for layout in layouts]
    attended = [layout.attended + [False] * (length - len(layout.ids)) for layout in layouts]
    first = min((min(layout.sources) for layout in layouts if layout.sources), default=0)
    logits = forward(ids, attended, length - first, _gather_inputs(rows, layouts, length))  # (rows, kept, words)
    before = length - logits.shape[1]
    logps, entropies, mask = [], [], []
    for number, layout in enumerate(layouts):
        chosen = logits[number, [place - before for place in layout.sources]]  # (tokens, words)
        distribution = log_distribution(chosen, scoring.temperature)
        wanted = torch.tensor([ids[number][place] for place in layout.places], device=logits.device, dtype=torch.long)
        rest = tokens - len(layout.places)
        logps.append(nn.functional.pad(distribution.gather(-1, wanted[:, None])[:, 0], (0, rest)))
        if entropy:
            entropies.append(nn.functional.pad(-(distribution.exp() * distribution).sum(-1), (0, rest)))
        given = rows[number].given
        mask.append([float(place - layout.start not in given) for place in layout.places] + [0.0] * rest)
    return Scores(
        torch.stack(logps),
        torch.stack(entropies) if entropy else torch.empty(0, device=logits.device),
        torch.tensor(mask, device=logits.device),
    )


def _gather_inputs(rows: Sequence[Row], layouts: Sequence[Layout], length: int) -> dict[str, torch.Tensor]:
    """Return the other inputs of a few rows: images one after another, and numbers of tokens, 0 for the completion."""
    gathered: dict[str, torch.Tensor] = {}
    for name, value in {name: value for row in rows for name, value in row.inputs.items()}.items():
        parts = [row.inputs.get(name) for row in rows]
        if value.ndim > 1:
            gathered[name] = torch.cat([part for part in parts if part is not None])
            continue
        gathered[name] = value.new_zeros(len(rows), length)
        for place, (part, layout) in enumerate(zip(parts, layouts)):
            if part is not None:
                gathered[name][place, layout.start - len(part) : layout.start] = part
    return gathered


@contextlib.contextmanager
def plain(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Within the block the model is as its class defines it: no patched forward, no checkpointing, and no dropout.

    trl 1.16 replaces `model.forward` by an attribute of the instance, and accelerate does so for autocast. Afterwards
    everything is as before. Guards do not listen. 4-bit layers keep their mode: in eval mode bitsandbytes packs their
    weights anew on a CPU.

    Args:
        model: the policy, wrapped or not.
        training: leave each module in its mode, so that dropout draws.
    """
    inner = unwrap(model)
    # By autograd.grad no parameter inside of a reentrant checkpoint is reached; a layer's own code may call one.
    direct = mock.patch.object(torch.utils.checkpoint.CheckpointFunction, "apply", lambda run, _, *args: run(*args))
    with unseen(), keep_modes(model), direct, contextlib.ExitStack() as stack:
        replaced = inner.__dict__.pop("forward", None)
        if replaced is not None:
            stack.callback(inner.__dict__.__setitem__, "forward", replaced)
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) is True:
                stack.enter_context(mock.patch.object(module, "gradient_checkpointing", False))
            if not training and not hasattr(getattr(module, "weight", None), "quant_state"):
                module.training = False
        yield


def depends_on_grad(model: nn.Module) -> bool:
    """Whether a model says other things while a graph is made: a hook may divide its logits there, and not in sampling.

    What drew the tokens is the policy.
    """
    inner = unwrap(model)
    if all(hook.__module__ == reading.__name__ for hook in inner._forward_hooks.values()):
        return False
    ids = torch.arange(4, device=input_device(model))[None] % vocabulary_size(model)
    with plain(model):
        with torch.no_grad():
            drawn = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        with torch.enable_grad():
            trained = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return not torch.allclose(drawn.float(), trained.detach().float(), rtol=1e-2, atol=1e-3)


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within the block adapters do nothing, or the copy named `ref` is used where trl made one.

    Not `disable_adapter()`, which switches requires_grad on for adapters that were frozen.
    """
    adapter = "ref" if "ref" in (getattr(model, "peft_config", None) or {}) else None
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if adapter is None and ("_disable_adapters" in vars(module) or hasattr(type(module), "_disable_adapters")):
                stack.enter_context(mock.patch.object(module, "_disable_adapters", True))
            elif adapter is not None and "_active_adapter" in vars(module):
                stack.enter_context(mock.patch.object(module, "_active_adapter", [adapter]))
        yield
