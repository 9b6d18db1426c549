"""A trainer's gradient beside the textbook's: both as arrows in the plane that they span, and the cosine by part."""

import math
from collections.abc import Mapping

from failurelab_course.notebook import display as notebook

HEALTHY = 0.999
_COLORS = ("#D55E00", "#009E73", "#7a4b8c")
_DASHES = ("--", "-.", ":")
_MARKS = ("X", "o", "s")


def steps(pairs: Mapping[str, tuple[float, float]], parts: Mapping[str, Mapping[str, float]], alt: str) -> None:
    """Show the gradients of trainers beside the textbook's, and in which parts of the model they point elsewhere.

    Args:
        pairs: by trainer, the cosine, and the size as a multiple of the textbook's.
        parts: by trainer, the cosine of each part of the model.
        alt: what it shows, as `notebook.show` wants it.
    """
    from matplotlib import pyplot

    figure, (plane, bars) = pyplot.subplots(1, 2, figsize=(8.8, 3.0), width_ratios=(1, 1.35))
    _draw_arrow(plane, 1.0, 0.0, "#999999", "-", "the textbook's", 5.0)
    for (name, (cosine, size)), color, dash in zip(pairs.items(), _COLORS, _DASHES):
        sine = math.sqrt(max(0.0, 1 - cosine**2))
        _draw_arrow(plane, size * cosine, size * sine, color, dash, f"{name}: cosine {cosine:.2f}")
    plane.set(xlim=(-0.1, 1.15), ylim=(-0.15, 1.15), aspect="equal", xticks=(0, 1), yticks=(0, 1))
    plane.set_title("one step, in lengths\nof the textbook's")
    plane.legend(loc="upper left", fontsize=9)
    for (name, cosines), color, mark in zip(parts.items(), _COLORS, _MARKS):
        bars.plot(list(cosines.values()), range(len(cosines)), mark, color=color, markersize=8, label=name)
    bars.axvspan(HEALTHY, 1.02, color="#009E73", alpha=0.25)
    bars.set(xlim=(min(0.0, *(min(cosines.values()) for cosines in parts.values())) - 0.02, 1.02), title="by part")
    bars.set_yticks(range(len(cosines)), list(cosines), fontsize=9)
    bars.invert_yaxis()
    bars.set_xlabel("cosine with the textbook")
    bars.legend(loc="lower left", fontsize=9)
    notebook.show(figure, alt)


def _draw_arrow(axes, x: float, y: float, color: str, dash: str, label: str, width: float = 2.4) -> None:
    style = {"arrowstyle": "-|>", "color": color, "lw": width, "linestyle": dash, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(x, y), xytext=(0, 0), arrowprops=style)
    axes.plot([], [], color=color, linestyle=dash, linewidth=width, label=label)
