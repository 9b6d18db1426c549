"""Figures of two models beside each other: an adapter that is lost, and a reference that is another policy."""

import torch

from failurelab.failures.predicates import Value


def of_adapter(trained: torch.Tensor, base: torch.Tensor, now: torch.Tensor) -> dict[str, float | None]:
    """Say what an adapter did to logits as it was loaded, and which part of that is gone now; all of one shape.

    Of a model that is neither that with the adapter nor that without, what is lost is not known.
    """
    effect, kept, lost = (float((a - b).abs().max()) for a, b in ((trained, base), (now, trained), (now, base)))
    known = min(kept, lost) <= 0.1 * effect
    return {"adapter_effect": effect, "adapter_lost": (kept / effect if effect else 0.0) if known else None}


def of_reference(policy: torch.Tensor, reference: torch.Tensor) -> dict[str, Value]:
    """Return the KL divergence of a policy from its reference, by their logits (batch, tokens, vocabulary)."""
    width = min(policy.shape[-1], reference.shape[-1])  # one of them may have tokens added
    one, other = (logits[..., :width].double().log_softmax(-1) for logits in (policy, reference))
    return {"kl_at_first_step": float((one.exp() * (one - other)).sum(-1).mean())}
