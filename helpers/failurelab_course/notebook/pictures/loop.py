"""The loop of GRPO, which recurs at the head and the end of each notebook: which arrow broke?"""

from collections.abc import Mapping
from typing import Any

from failurelab_course.notebook import display as notebook

STAGES = ("rollout", "score", "advantage", "gradient", "update")
# What goes along each arrow, and from which stage to which.
ARROWS = {
    "completions": ("rollout", "score"),
    "rewards": ("score", "advantage"),
    "log-probs": ("rollout", "gradient"),
    "advantages": ("advantage", "gradient"),
    "gradients": ("gradient", "update"),
    "weights": ("update", "rollout"),
}
# How an arrow bends, how far from the middle it begins, and how high its name stands.
_STRAIGHT = (0.0, 0.0, 0.2)
_PLACES = {"log-probs": (-0.27, 0.22, 0.72), "weights": (-0.17, -0.24, -0.62)}
BROKEN, DEAR, SOUND = "#a3260d", "#8a6100", "#444444"


def loop(broken: Mapping[str, str] | None = None, *, dear: bool = False, before: str = "") -> None:
    """Show the loop, with the arrows that are broken marked.

    Args:
        broken: names of arrows (`ARROWS`) with a few words for each, such as
            `{"completions": "drawn without the prompt"}`.
        dear: what the arrows carry is right, and costs too much: another colour, and no ✗.
        before: what is broken before the first rollout, such as `load: on another GPU`.

    Raises:
        ValueError: an arrow's name is unknown.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 2.4))
    marked = dict(broken or {})
    draw(axes, marked, dear=dear)
    if before:
        axes.set_xlim(-1.6, 4.5)
        box = {"boxstyle": "round,pad=0.4", "facecolor": "#fbe9e5", "edgecolor": BROKEN}
        axes.text(-1.15, 0, before.partition(":")[0], ha="center", va="center", fontsize=10, bbox=box)
        arrow = {"arrowstyle": "-|>", "color": BROKEN, "lw": 2.4, "linestyle": "--"}
        axes.annotate("", xy=(-0.36, 0), xytext=(-0.85, 0), arrowprops=arrow)
        axes.text(-1.5, 1.4, f"✗ {before}", ha="left", va="top", fontsize=9.5, color=BROKEN, fontweight="bold")
    words = [f"{name} {note}" for name, note in marked.items()] + [before] * bool(before)
    healthy = "The loop of GRPO: rollout, score, advantage, gradient, update, and back to the rollout"
    what = "expensive" if dear else "broken"
    notebook.show(figure, f"{healthy}; {what} here: {', '.join(words)}" if words else healthy)


def draw(axes: Any, marked: Mapping[str, str], ids: Mapping[str, str] | None = None, dear: bool = False) -> None:
    """Draw the loop into matplotlib axes, with `ids` beside the arrows and words to those that are `marked`.

    Raises:
        ValueError: an arrow's name is unknown.
    """
    if unknown := [name for name in marked if name not in ARROWS]:
        raise ValueError(f"no arrow of the loop is called {', '.join(unknown)}: they are {', '.join(ARROWS)}")
    axes.set(xlim=(-0.5, 4.5), ylim=(-1.25, 1.45))
    axes.axis("off")
    for place, stage in enumerate(STAGES):
        box = {"boxstyle": "round,pad=0.4", "facecolor": "#e8f1f8", "edgecolor": "#0072B2"}
        axes.text(place, 0, stage, ha="center", va="center", fontsize=10, bbox=box)
    for name, (start, end) in ARROWS.items():
        color = (DEAR if dear else BROKEN) if name in marked else SOUND
        _draw_arrow(axes, name, STAGES.index(start), STAGES.index(end), color)
        middle, (_, _, height) = (STAGES.index(start) + STAGES.index(end)) / 2, _PLACES.get(name, _STRAIGHT)
        beneath = height - 0.17 if abs(height) > 0.5 else -0.2
        axes.text(middle, beneath, (ids or {}).get(name, ""), ha="center", va="center", fontsize=8, color=BROKEN)
    told = [f"{'' if dear else '✗ '}{name}: {note}" for name, note in marked.items()]
    axes.text(
        -0.45, 1.4, "\n".join(told), ha="left", va="top", fontsize=9.5, color=DEAR if dear else BROKEN,
        fontweight="bold",
    )  # fmt: skip


def _draw_arrow(axes: Any, name: str, start: int, end: int, color: str) -> None:
    """Draw one arrow: straight, along the top (log-probs), or along the bottom (weights), with its name."""
    bend, side, height = _PLACES.get(name, _STRAIGHT)
    width = 1.3 if color == SOUND else 2.4
    gap = 0.0 if bend else 0.36
    axes.annotate(
        "",
        xy=(end - gap, side),
        xytext=(start + gap, side),
        arrowprops={
            "arrowstyle": "-|>",
            "color": color,
            "lw": width,
            "linestyle": "--" if color == BROKEN else "-",  # told without the colour, too
            "connectionstyle": f"arc3,rad={bend}",
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )
    words = f"✗ {name}" if color == BROKEN else name
    weight = "normal" if color == SOUND else "bold"
    axes.text((start + end) / 2, height, words, ha="center", va="center", fontsize=8.5, color=color, fontweight=weight)
