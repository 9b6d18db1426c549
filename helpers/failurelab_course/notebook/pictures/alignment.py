"""Which row of logits scores which token: rows above, tokens below, and an arrow from each row that was used."""

from collections.abc import Mapping, Sequence
from typing import Any

from failurelab_course.notebook import display as notebook

RIGHT, WRONG = "#00704f", "#a3260d"


def arrows(tokens: Sequence[str], used: Mapping[str, Sequence[int]], alt: str) -> None:
    """Show, for each heading, which row each of the last tokens was scored by.

    Args:
        tokens: of the whole sequence; the last ones were scored.
        used: for each heading the place of the row that scored each of them, counted from 0.
        alt: what the picture shows, as `notebook.show` wants it.
    """
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, len(used), figsize=(4.4 * len(used), 2.9), squeeze=False)
    for axes, (name, rows) in zip(places[0], used.items()):
        axes.set(xlim=(-0.6, len(tokens) - 0.4), ylim=(-0.95, 2.3))
        axes.set_title(name, fontsize=10)
        axes.axis("off")
        first = len(tokens) - len(rows)
        for place, token in enumerate(tokens):
            _draw_box(axes, place, 1.6, f"after\n{token}", place in rows)
            _draw_box(axes, place, 0, token, place >= first)
        for place, row in enumerate(rows, first):
            _draw_arrow(axes, row, place)
        ahead = ", ".join(str(number) for number in sorted({place - row for place, row in enumerate(rows, first)}))
        is_right = ahead == "1"
        words = "✓ a row scores the next token" if is_right else f"✗ a row scores the token {ahead} places on"
        axes.text(-0.4, -0.75, words, color=RIGHT if is_right else WRONG, fontsize=9.5)
    figure.supxlabel("above: rows of logits, each made after the token that it names; below: the tokens", fontsize=9)
    notebook.show(figure, alt)


def _draw_box(axes: Any, place: float, height: float, words: str, is_used: bool) -> None:
    box = {
        "boxstyle": "round,pad=0.35",
        "facecolor": "#e8f1f8" if is_used else "white",
        "edgecolor": "#0072B2" if is_used else "#bbbbbb",
    }
    ink = "black" if is_used else "#888888"
    axes.text(place, height, words, ha="center", va="center", fontsize=9, color=ink, bbox=box)


def _draw_arrow(axes: Any, row: int, place: int) -> None:
    """Draw an arrow from a row to the token that it scores: right if that is the next one, else dashed."""
    is_right = place == row + 1
    color = RIGHT if is_right else WRONG
    style = {"arrowstyle": "-|>", "color": color, "lw": 2, "linestyle": "-" if is_right else "--"}
    axes.annotate("", xy=(place, 0.32), xytext=(row, 1.18), arrowprops=style)
