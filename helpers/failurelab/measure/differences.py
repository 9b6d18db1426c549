"""Figures of two models beside each other: an adapter that is lost."""

import torch


def of_adapter(trained: torch.Tensor, base: torch.Tensor, now: torch.Tensor) -> dict[str, float | None]:
    """Say what an adapter did to logits as it was loaded, and which part of that is gone now; all of one shape.

    Of a model that is neither that with the adapter nor that without, what is lost is not known.
    """
    effect, kept, lost = (float((a - b).abs().max()) for a, b in ((trained, base), (now, trained), (now, base)))
    known = min(kept, lost) <= 0.1 * effect
    return {"adapter_effect": effect, "adapter_lost": (kept / effect if effect else 0.0) if known else None}
