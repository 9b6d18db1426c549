"""Rows of several processes: the advantage that each row earned, above the one that it was trained with."""

from collections.abc import Sequence
from typing import Any

from failurelab_course.notebook import display as notebook

EARNED, OTHER, INK = "#0072B2", "#D55E00", "#444444"


def rows_of_ranks(
    earned: Sequence[float], used: Sequence[float], cosines: Sequence[float], group: int, alt: str
) -> None:
    """Show both advantages of each row, the rows of the ranks beside each other.

    Args:
        earned: the advantage that the definition gives each row, rank 0's rows first.
        used: the advantage that each row was trained with, in the same order.
        cosines: of each rank's gradient with the one that its rows' own advantages give.
        group: completions of a prompt.
        alt: what the picture shows, for those who do not see it.
    """
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, figsize=(9, 4.0), sharex=True, sharey=True)
    _draw_bars(panels[0], earned, earned, "earned by the row")
    _draw_bars(panels[1], used, earned, "trained with")
    size = len(earned) // len(cosines)
    top = 1.35 * max(map(abs, [*earned, *used]))
    for panel in panels:
        panel.set_ylim(-top, top)
        for edge in range(group, len(earned), group):
            panel.axvline(edge - 0.5, color="#cccccc", lw=0.7, zorder=0)
        for rank in range(1, len(cosines)):
            panel.axvline(rank * size - 0.5, color=INK, lw=1.8)
    for rank, cosine in enumerate(cosines):
        middle = (rank + 0.5) * size - 0.5
        panels[0].set_title(f"rank {rank}", loc=("left", "right")[rank > 0], fontsize=10)
        panels[1].text(
            middle,
            -0.97 * top,
            f"rank {rank}: cosine {cosine:+.2f}",
            ha="center",
            va="bottom",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    panels[1].set_xlabel(f"row of the batch; between two thin lines the {group} completions of a prompt")
    notebook.show(figure, alt)


def _draw_bars(axes: Any, values: Sequence[float], earned: Sequence[float], label: str) -> None:
    """Draw a bar for each row, and hatch those that are not what the row has earned."""
    for place, (value, own) in enumerate(zip(values, earned)):
        right = abs(value - own) < 1e-3
        axes.bar(place, value, 0.8, color=EARNED if right else "white", edgecolor=EARNED if right else OTHER,
                 hatch="" if right else "////", linewidth=0.8)  # fmt: skip
        axes.plot(place, 0, "." if right else "x", color=EARNED if right else OTHER, ms=3)
    axes.axhline(0, color=INK, lw=0.6)
    axes.set_ylabel(label)
