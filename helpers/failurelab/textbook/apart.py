"""How far two gradients lie apart, and how far two right ones do."""

import dataclasses
import math
from collections.abc import Mapping

import torch

from failurelab.failures.predicates import Value

# The healthy band, chosen before any run: float32 without dropout. It widens to three times the measured floor.
COSINE, SIZE, TIMES = 1e-3, 0.02, 3.0
NEAR = 0.01  # of the norm: a suspect's gradient is the trainer's, and a rival's is another one
# Nats between a policy and a reference that is the same: on some processors their log-probabilities differ in the last
# bits (5e-6 was seen), and then a KL term has a gradient that is rounding alone.
SAME = 3e-5
NAMES = 0.15  # of the norm: how far a suspect's gradient may lie at most, however far right ones lie apart
# Bands of the cosine and of the size that hold too much: half of the mistakes that the textbook knows lie inside (of
# 70, planted in four kinds of steps, the median cosine is 0.85), and a gradient of half its size. Within such a band
# nothing is said to be right; what lies outside is wrong all the same.
WIDE = 0.15, 0.5


@dataclasses.dataclass(frozen=True)
class Apart:
    """How two gradients differ.

    Attributes:
        cosine: of the angle between them, over all tensors.
        size: norm of the first by that of the second.
        distance: norm of the difference by that of the first.
    """

    cosine: float
    size: float
    distance: float

    def __str__(self) -> str:
        return f"cosine {self.cosine:+.4f}, size {self.size:.3g}"


@dataclasses.dataclass(frozen=True)
class Floor:
    """How far passes of the textbook in the numbers at hand, and with dropout, lie from the exact one.

    Attributes:
        cosine: how far the cosine between them lies below 1.
        size: how far the ratio of their norms lies from 1.
        distance: norm of the difference by that of one.
    """

    cosine: float = 0.0
    size: float = 0.0
    distance: float = 0.0

    @property
    def band(self) -> tuple[float, float]:
        """How far a healthy cosine may lie below 1, and a healthy size beside 1."""
        return max(COSINE, TIMES * self.cosine), max(SIZE, TIMES * self.size)

    @property
    def near(self) -> float:
        """How far a suspect's gradient may lie from the trainer's, and how much farther its rivals' must."""
        return max(NEAR, TIMES * self.distance)

    @property
    def wide(self) -> bool:
        """Whether the bands are too wide to say that a gradient is right."""
        return any(width > most for width, most in zip(self.band, WIDE))

    def figures(self, apart: Apart) -> dict[str, Value]:
        """Return what the registry's F20 and F21 are about."""
        cosine, size = self.band
        return {
            "step_cosine": apart.cosine,
            "step_cosine_least": 1 - cosine,
            "step_size": apart.size,
            "step_size_off": abs(apart.size - 1),
            "step_size_most": size,
        }

    def widened(self, apart: Apart) -> "Floor":
        """Return the floor that allows for another pass too."""
        return Floor(
            max(self.cosine, 1 - apart.cosine),
            max(self.size, abs(apart.size - 1)),
            max(self.distance, apart.distance),
        )

    def holds(self, apart: Apart) -> bool:
        """Whether a trainer's gradient is the textbook's."""
        cosine, size = self.band
        return apart.cosine >= 1 - cosine and abs(apart.size - 1) <= size


def norm(gradient: Mapping[str, torch.Tensor]) -> float:
    """Return the norm over all tensors."""
    return math.sqrt(sum(inner(grad, grad) for grad in gradient.values()))


def inner(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the inner product; of large tensors in their own numbers: a copy in float64 costs as much as a pass."""
    one, other = one.reshape(-1), other.reshape(-1)
    return float(torch.dot(one, other) if one.numel() > 2**20 else torch.dot(one.double(), other.double()))


def measure_apart(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> Apart:
    """Compare two gradients over all tensors of the second."""
    one, other = norm(first), norm(second)
    if not one or not other:
        return Apart(0.0, one / other if other else math.inf, 1.0 if one or other else 0.0)
    dot = sum(inner(first[name], grad) for name, grad in second.items())
    away = math.sqrt(max(0.0, one**2 + other**2 - 2 * dot))
    return Apart(max(-1.0, min(1.0, dot / (one * other))), one / other, away / one)
