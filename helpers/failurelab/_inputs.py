"""The repair for reentrant gradient checkpointing: the output of the input embeddings requires a gradient.

A module below `gradients` and `adapters`, which both offer it.
"""

from typing import Any

import torch
from torch import nn

from failurelab._checkpointing import option_name
from failurelab._unwrap import unwrap
from failurelab.handles import Handle


class GradientError(RuntimeError):
    """A question about gradients has no answer here; the message says what was found and the next step."""


class _RequireGrad:
    """A forward hook: the module's output requires a gradient. It counts its holders."""

    def __init__(self) -> None:
        self.holders = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        # without gradients there is no graph to keep, and inference tensors must stay as they are
        if torch.is_grad_enabled():
            output.requires_grad_(True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_RequireGrad":
        return _RequireGrad()  # a copied model, such as a reference model, keeps the hook without holders


def require_input_grads(model: nn.Module) -> Handle:
    """Make the output of the input embeddings require a gradient, so that reentrant checkpointing keeps the graph.

    For plain, PEFT and quantized models, before or after they are wrapped. A second call, on the model or on its PEFT
    wrapper, adds no second hook; the hook is removed with the last handle. It works beside the hooks that transformers
    and trl set for the same purpose (`enable_input_require_grads`).

    Args:
        model: a transformers model, bare or wrapped.

    Returns:
        A handle; `remove()` takes the repair back.

    Raises:
        GradientError: the model has no input embeddings to hook.
    """
    embeddings = input_embeddings(model)
    hook = next((hook for hook in embeddings._forward_hooks.values() if isinstance(hook, _RequireGrad)), None)
    if hook is None:
        hook = _RequireGrad()
        embeddings.register_forward_hook(hook)
    hook.holders += 1

    def undo() -> None:
        hook.holders -= 1
        if not hook.holders:
            for key in [key for key, other in embeddings._forward_hooks.items() if other is hook]:
                del embeddings._forward_hooks[key]

    return Handle("input embeddings require a gradient", undo)


def input_embeddings(model: nn.Module) -> nn.Module:
    """Return the module whose output is to require a gradient, looking through wrappers.

    Raises:
        GradientError: the model has none.
    """
    base = unwrap(model)
    try:
        embeddings = base.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embeddings = None
    if not isinstance(embeddings, nn.Module):
        raise GradientError(
            f"{type(base).__name__} has no input embeddings (get_input_embeddings), so there is no output to make "
            "require a gradient. Next: hand over the transformers model itself, or use "
            f"{option_name()}_kwargs={{'use_reentrant': False}}, which needs no hook."
        )
    return embeddings
