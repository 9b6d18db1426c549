"""A weight among the numbers that its format has, and which weights of a model a step can move."""

from collections.abc import Sequence
from typing import Any

import torch

STAYS, MOVES, GRID = "#a3260d", "#0072B2", "#444444"


def number_line(axes: Any, weight: float, step: float, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Draw a weight, a step up from it, and where the sum is rounded to; return whether the weight moves.

    Args:
        axes: matplotlib's.
        weight: a number that the format has.
        step: what is added, above 0.
        dtype: of the weight.
    """
    start = torch.tensor(weight, dtype=dtype)
    weight = float(start)
    grid = [start]
    for _ in range(4):
        grid.append(torch.nextafter(grid[-1], torch.full_like(start, torch.inf)))
    below = torch.nextafter(start, torch.full_like(start, -torch.inf))
    numbers = [float(number) for number in (below, *grid)]
    space = numbers[2] - numbers[1]
    landed = float((start.double() + step).to(dtype))
    at = [(number - weight) / space for number in numbers]
    axes.hlines(0, at[0] - 0.2, at[-1] + 0.2, color=GRID, linewidth=1)
    axes.plot(at, [0] * len(at), "|", color=GRID, markersize=16, linestyle="none")
    for place, number in zip(at, numbers):
        axes.text(place, -0.55, f"{number:.6g}", ha="center", va="top", fontsize=8.5, color=GRID)
    axes.axvspan(-0.5 * (1 if at[0] < -0.9 else -at[0]), 0.5, ymin=0.35, ymax=0.6, color="#e3e3e3", zorder=0)
    moves = landed != weight
    color, end = (MOVES, "moves") if moves else (STAYS, "is rounded back")
    axes.annotate(
        "", xy=(step / space, 0.55), xytext=(0, 0.55), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 2}
    )
    axes.plot([0], [0], "o", color="black", markersize=7, linestyle="none")
    axes.plot([(landed - weight) / space], [0], "s" if moves else "x", color=color, markersize=9, linestyle="none")
    axes.text(
        at[0] - 0.2, 1.45, f"{weight:.4g} + {step:g}: {end}", ha="left", va="top", fontsize=10, color=color,
        fontweight="bold",
    )  # fmt: skip
    axes.set(xlim=(at[0] - 0.4, at[-1] + 0.4), ylim=(-1.4, 1.5))
    axes.axis("off")
    return moves


def movable(axes: Any, weights: torch.Tensor, moves: Sequence[bool] | torch.Tensor, title: str) -> None:
    """Draw how many weights there are of each size, and which of them a step moves.

    Args:
        axes: matplotlib's.
        weights: of a model, (elements,); zeros are left out of the picture.
        moves: for each weight, whether it moves.
        title: such as the step.
    """
    sizes, moves = weights.detach().abs().float(), torch.as_tensor(moves)
    moves, sizes = moves[sizes > 0], sizes[sizes > 0]
    edges = [10 ** (power / 4) for power in range(-20, 2)]
    axes.hist(
        [sizes[moves].numpy(), sizes[~moves].numpy()],
        bins=edges,
        stacked=True,
        color=[MOVES, "#eeeeee"],
        edgecolor=GRID,
        linewidth=0.6,
        label=["moves", "stays"],
    )
    for bar in axes.containers[0]:
        bar.set_hatch("///")
    axes.set_xscale("log")
    axes.set_xticks([1e-4, 1e-2, 1])
    axes.minorticks_off()
    axes.set(xlabel="size of a weight", yticks=[], title=title)
    axes.grid(visible=False)
    axes.legend(loc="upper left", fontsize=9)
