"""Whether the model's backward pass is the derivative of its forward pass.

A layer that computes without a graph, detaches too much, or has a hook on its gradient gives the right loss and a wrong
gradient; and the textbook's own pass goes through the same layers. Finite differences need no graph: the weights are
moved a little, both ways, along a few random directions, and what the scores change by is compared with the gradient.
The loss's slopes by the scores are those of the textbook's pass, so clipping, which is not smooth, takes no part.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from failurelab.textbook.apart import norm
from failurelab.textbook.gradient import EXACT, Gradient, Step, Tally, forward_of, is_out_of_memory
from failurelab.textbook.ranks import Ranks
from failurelab.textbook.scores import plain

DIRECTIONS = 3
# How far, in root mean squares of the weights. A function may be curved so strongly that a difference over the first is
# no slope; then one over the second is. What is wrong is wrong over both.
FAR = (1e-3, 1e-4)
# A norm behind a projection that begins at zero, as in Gemma 3, is flat over both. There the gradient is so large that
# shorter distances are not lost in rounding, and what was curvature shrinks; what is wrong is as wrong as before.
NEAR = (1e-5, 1e-6)
WRONG, TIMES = 0.1, 10  # of the gradient's norm; or so many times the error, where that is more


@dataclasses.dataclass(frozen=True)
class Backward:
    """How far a gradient lies from what the scores change by.

    Attributes:
        away: root mean square over the directions, by the norm of the gradient.
        error: how far the changes to both sides differ, by the same: rounding, or a step that is too large.
    """

    away: float
    error: float

    @property
    def wrong(self) -> bool:
        """Whether the gradient is not the derivative of what the model computes."""
        return self.away > max(WRONG, TIMES * self.error)


@torch.no_grad()
def measure_backward(model: nn.Module, step: Step, gradient: Gradient, tally: Tally, ranks: Ranks) -> Backward:
    """Compare a gradient of the textbook with finite differences of the scores that its pass left in `tally`."""
    scale = _scale(model, gradient)
    try:
        for far in FAR:
            backward = _measure(model, step, gradient, tally, far * scale, ranks)
            if not backward.wrong:
                return backward
        for far in NEAR:
            nearer = _measure(model, step, gradient, tally, far * scale, ranks)
            if not nearer.wrong and max(2 * nearer.away, TIMES * nearer.error) < backward.away:
                return nearer
    except RuntimeError as problem:
        if not is_out_of_memory(problem):
            raise
        return Backward(0.0, math.inf)
    return backward


def _scale(model: nn.Module, gradient: Gradient) -> float:
    """Return the root mean square of the weights that have a gradient."""
    trained = {name: parameter for name, parameter in model.named_parameters() if name in gradient}
    return norm(trained) / math.sqrt(sum(parameter.numel() for parameter in trained.values()))


def _measure(model: nn.Module, step: Step, gradient: Gradient, tally: Tally, far: float, ranks: Ranks) -> Backward:
    """Compare along each direction, at one distance."""
    trained = {name: parameter for name, parameter in model.named_parameters() if name in gradient}
    still, size, away, error = _without_gradient(model), norm(gradient), 0.0, 0.0
    for number in range(DIRECTIONS):
        moved = _move(trained, far, number)
        for name, parameter in trained.items():
            for place in still.get(id(parameter), ()):
                moved[name][place] = parameter[place]
        expected = sum(float(((moved[name] - trained[name]) * gradient[name]).sum()) for name in trained)
        change = functools.partial(_change, model, trained, moved, step, tally)
        up = sum(ranks.collect(change))
        for name, parameter in trained.items():
            moved[name] = 2 * parameter - moved[name]
        down = sum(ranks.collect(change))
        away += ((up - down) / 2 - expected) ** 2 / DIRECTIONS
        error += ((up + down) / 2) ** 2 / DIRECTIONS
    return Backward(math.sqrt(away) / (far * size), math.sqrt(error) / (far * size))


def _without_gradient(model: nn.Module) -> dict[int, list[Any]]:
    """Return, by a parameter's id, the places whose gradient is no derivative, by definition of the embedding.

    The row of `padding_idx` has none, also where its token is read; `scale_grad_by_freq` divides all. PEFT's adapter of
    an embedding is asked in the same way.
    """
    still: dict[int, list[Any]] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            continue
        if module.scale_grad_by_freq:
            still.setdefault(id(module.weight), []).append(slice(None))
        elif module.padding_idx is not None:
            still.setdefault(id(module.weight), []).append(module.padding_idx)
    for module in model.modules():
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        for each in getattr(module, "lora_embedding_A", {}).values():  # (rank, words)
            still[id(each)] = [(slice(None), place) for place in still.get(id(weight), [])]
    return still


def _move(trained: Mapping[str, nn.Parameter], far: float, seed: int) -> dict[str, torch.Tensor]:
    device = next(iter(trained.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: parameter.float()
        + far * torch.randn(parameter.shape, generator=generator, device=device).to(parameter.device)
        for name, parameter in trained.items()
    }


def _change(
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    moved: Mapping[str, torch.Tensor],
    step: Step,
    tally: Tally,
) -> float:
    """Return what the loss changes by where the weights are moved, by its slopes where they were not."""
    total = 0.0
    with plain(model):
        forward, _ = forward_of(model, trained, EXACT, moved)
        for part in tally.slopes:
            if part.part.start not in step.own:
                continue
            now = step.score_rows(forward, part.part, entropy=len(part.scores) > 1)
            for score, before, slope in zip((now.logps, now.entropies), part.scores, part.slopes):
                total += float(((score - before.to(score)).double() * slope.to(score)).sum())
    return total
