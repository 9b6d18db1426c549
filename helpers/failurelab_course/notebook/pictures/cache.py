"""What `generate` hands to the model at each token, and what the model's cache holds: a row of boxes for each call."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from failurelab_course.notebook import display as notebook

HANDED, HELD, LOST = ("#0072B2", "white", ""), ("#dcdcdc", "#444444", ""), ("white", "#a3260d", "//")


def steps(calls: Mapping[str, Sequence[tuple[int, int]]], notes: Mapping[str, str], alt: str) -> None:
    """Show the calls of each `generate`, beside each other.

    Args:
        calls: for each heading, the calls in order: how many tokens were handed in, and how many the cache held.
        notes: for some of the headings, a sentence on what is wrong there.
        alt: what the picture shows, as `notebook.show` wants it.
    """
    from matplotlib import patches, pyplot

    figure, places = pyplot.subplots(1, len(calls), figsize=(9.2, 2.5), squeeze=False)
    last = max(handed + held for made in calls.values() for handed, held in made)
    for axes, (name, made) in zip(places[0], calls.items()):
        axes.set(xlim=(-1.9, last), ylim=(-len(made) - 0.75, 0.7))
        axes.set_title(name, fontsize=10)
        axes.axis("off")
        read = made[0][0]  # tokens of the prompt
        for row, (handed, held) in enumerate(made):
            axes.text(-0.25, -row - 0.4, f"call {row + 1}", ha="right", va="center", fontsize=9)
            _draw_boxes(axes, row, handed, held, read + row)
        if name in notes:
            axes.text(-1.9, -len(made) - 0.1, f"✗ {notes[name]}", color=LOST[1], fontsize=9, va="top")
    kinds = {"handed in": HANDED, "in the cache": HELD, "in neither": LOST}
    keys = [
        patches.Patch(facecolor=face, edgecolor=LOST[1] if hatch else "#444444", hatch=hatch, label=name)
        for name, (face, _, hatch) in kinds.items()
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=9)
    notebook.show(figure, alt)


def _draw_boxes(axes: Any, row: int, handed: int, held: int, length: int) -> None:
    """Draw the tokens of one call: the newest are handed in, those before them are in the cache, or nowhere."""
    from matplotlib import patches

    for place in range(length):
        is_handed = place >= length - handed
        face, ink, hatch = HANDED if is_handed else HELD if place >= length - handed - held else LOST
        edge = LOST[1] if hatch else "#444444"
        box = patches.Rectangle((place + 0.05, -row - 0.75), 0.9, 0.7, facecolor=face, edgecolor=edge, hatch=hatch)
        axes.add_patch(box)
        if not hatch:
            axes.text(place + 0.5, -row - 0.4, str(place + 1), ha="center", va="center", fontsize=8, color=ink)


def agreement(axes: Any, agree: Sequence[bool], switches: Mapping[str, str]) -> None:
    """Draw which answers are those of eval mode: white; each of the others is a dark square.

    Args:
        axes: matplotlib's.
        agree: for each prompt a+b=, all b of the first a first; as many of the one as of the other.
        switches: the setting, for the title.
    """
    import numpy

    side = math.isqrt(len(agree))
    axes.imshow(~numpy.reshape(agree, (side, side)), cmap="Greys", vmin=0, vmax=1)
    words = [f"{name}: {value}" for name, value in switches.items()]
    axes.set_title("\n".join([*words, f"{numpy.mean(agree):.0%} the same"]), fontsize=9, fontweight="normal")
    axes.set(xticks=(0, side - 1), yticks=(0, side - 1), xlabel="b in a+b=", ylabel="a")
    axes.grid(False)
    for edge in axes.spines.values():
        edge.set_visible(True)
