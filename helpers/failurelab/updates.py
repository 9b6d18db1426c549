"""Updates that round to nothing: which share of the weights one optimizer step can change, before any training.

What goes wrong: a bfloat16 number has 8 significant bits, so two neighbours near 0.02 are 0.0001 apart. AdamW's first
step is as large as the learning rate. Added to a weight that is kept in bfloat16 it is lost if it is less than half of
that distance, at every step anew: loss and grad_norm look healthy, and the weights stay as they were. Whether that
happens can be read from the weights, their dtype and the learning rate alone:

    print(updates.share_that_changes(model, learning_rate=1e-6))

What is predicted is a step that is added to the weights themselves, and rounded to nearest. An optimizer that keeps
float32 copies (DeepSpeed's), or that rounds stochastically, loses nothing, whatever is predicted. An element whose
gradient is zero does not change in any dtype; the prediction is for those that have one.

Sources: torch.optim.AdamW (the step is learning_rate * m / (sqrt(v) + eps)); IEEE 754 (to nearest, ties to even).
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from failurelab._text import dtype_name, list_names
from failurelab.errors import FailureLabError

LOST, WHOLE = 0.05, 0.6
"""Shares of elements that a step changes: below LOST updates are lost, below WHOLE the run is slowed, above it is well.

Measured on the small Qwen2, GRPO, bfloat16 weights against float32 ones at the same rate, one seed, by the share of the
first step, as the part of float32's gain in accuracy: 0.9 % and 3.7 % a twentieth after 600 steps; 7 % a sixth, 29 % a
half, 54 % four fifths, 85 % all after 200 (benchmarks/rounding.py). Public runs at 5e-6, some 8 % by their
initializer_range, are known to learn: larger models need smaller changes. That is slowed, and no failure by itself."""
_CHUNK = 1 << 22  # elements at once, so that the pass holds some 50 MB


class UpdateError(FailureLabError):
    """Nothing could be judged; the message says why, and the next step."""


@dataclasses.dataclass(frozen=True)
class UpdateReport:
    """Which share of the elements one step can change.

    Attributes:
        learning_rate: of the step, which is as large as AdamW's first one: m / sqrt(v) is 1 then, and less later, where
            gradients change their sign.
        tensors: how many were judged.
        by_dtype: of each dtype that these are trained in, how many elements there are, and the share that changes.
        left_out: why other tensors were not judged, by name.
    """

    learning_rate: float
    tensors: int
    by_dtype: Mapping[torch.dtype, tuple[int, float]]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Elements of all tensors that were judged."""
        return sum(elements for elements, _ in self.by_dtype.values())

    @property
    def share(self) -> float:
        """Share of these elements that a step changes."""
        return sum(elements * share for elements, share in self.by_dtype.values()) / self.elements

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.2%} in {dtype_name(dtype)}" for dtype, (_, share) in self.by_dtype.items())
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            reasons.setdefault(reason, []).append(name)
        rest = "".join(f" Not judged: {list_names(names)} ({reason})." for reason, names in reasons.items())
        return (
            f"a step of learning rate {self.learning_rate:g} changes {self.share:.2%} of {self.elements:,} elements "
            f"in {self.tensors} tensors ({shares}).{rest}"
        )


def grade(share: float, least: float = LOST) -> str:
    """Return `lost`, `slowed` or `whole`: what a share of elements that a step changes means for learning.

    An adapter's B begins at zero, where any step changes it: grade it by its other half, A, and with `least` 0, for a
    LoRA whose A stands still learns by its B.
    """
    return "lost" if share < least else "slowed" if share < WHOLE else "whole"


def share_that_changes(model: nn.Module, learning_rate: float) -> UpdateReport:
    """Predict which share of the trainable elements one optimizer step can change; nothing is trained.

    Args:
        model: any; frozen parameters are left out.
        learning_rate: of the step: the highest of the schedule is the most favourable.

    Raises:
        UpdateError: no trainable parameter can be judged.
    """
    return shares(((name, each) for name, each in model.named_parameters() if each.requires_grad), learning_rate)


def shares(
    tensors: Iterable[tuple[str, torch.Tensor]],
    learning_rate: float,
    *,
    dtype: torch.dtype | None = None,
) -> UpdateReport:
    """Predict as `share_that_changes`, for tensors by name, such as a checkpoint's; one is held at a time.

    Args:
        tensors: pairs of a name and a tensor.
        learning_rate: of the step.
        dtype: that the tensors would be trained in; by default each one's own.

    Raises:
        UpdateError: nothing was given that could be judged.
    """
    if not learning_rate > 0:
        raise UpdateError(
            f"a learning rate of {learning_rate} changes nothing, in any dtype. Next: give the highest one"
        )
    judged, left_out = collections.defaultdict(list), {}
    for name, tensor in tensors:
        tensor = tensor.detach()
        if reason := not_judged(tensor):
            left_out[name] = reason
            continue
        kept = dtype or tensor.dtype
        judged[kept].append((tensor.numel(), expected_share(tensor, learning_rate, dtype=kept)))
    if not judged:
        why = next((f"{name}: {reason}" for name, reason in left_out.items()), "nothing is trainable")
        raise UpdateError(f"no weights to judge ({why}). Next: give the tensors as the optimizer gets them")
    by_dtype = {}
    for kept, parts in judged.items():
        elements = sum(count for count, _ in parts)
        by_dtype[kept] = elements, sum(count * share for count, share in parts) / elements
    by_dtype = dict(sorted(by_dtype.items(), key=lambda item: -item[1][0]))
    return UpdateReport(learning_rate, sum(map(len, judged.values())), by_dtype, left_out)


def to_float32(model: nn.Module) -> list[str]:
    """Cast trainable tensors that are kept in 16 bits to float32, in place; return their names.

    For QLoRA: from 0.26, trl casts the adapters of a quantized model to bfloat16 while the trainer is made, whatever
    PEFT made them in. Call it on `trainer.model` after that and before `train()`, which leaves them as they are.

    Raises:
        UpdateError: ZeRO-3 has partitioned a tensor, so that its numbers are not here.
    """
    low = {n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point() and p.itemsize < 4}
    for name, parameter in low.items():
        if hasattr(parameter, "ds_id"):
            raise UpdateError(
                f"{name} is partitioned by ZeRO-3, whose optimizer steps copies in float32 anyway. Next: leave it"
            )
        parameter.data = parameter.data.float()
    return list(low)


def expected_share(tensor: torch.Tensor, step: float, *, dtype: torch.dtype | None = None) -> float:
    """Return which share of a tensor's elements another number replaces when a step is added and the sum is rounded.

    Half of the steps are taken upwards and half downwards, because the signs of gradients are not known.

    Args:
        tensor: of any shape, in a floating-point dtype.
        step: its size, larger than 0, in the units of the weights.
        dtype: that the weights are kept in; by default the tensor's.
    """
    dtype, changed = dtype or tensor.dtype, 0
    flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).reshape(-1)
    wide = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    for start in range(0, flat.numel(), _CHUNK):
        before = flat[start : start + _CHUNK].to(dtype)
        exact = before.to(wide)
        changed += sum(int(((exact + signed).to(dtype) != before).sum()) for signed in (step, -step))
    return changed / (2 * flat.numel())


def moved(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Return which share of elements another number replaces when weights go from one to another in a dtype."""
    return {"elements_moved": float((before.to(dtype) != after.to(dtype)).double().mean())}


def not_judged(tensor: torch.Tensor) -> str:
    """Return why no step on this tensor's own numbers can be predicted; empty if one can."""
    if hasattr(tensor, "ds_id"):
        return "partitioned by ZeRO-3, whose optimizer steps copies in float32"
    if tensor.is_meta:
        return "on the meta device, or offloaded: its numbers are not here"
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2 or hasattr(tensor, "quant_state"):
        return "quantized: no optimizer steps it"
    return "" if tensor.numel() else "empty"
