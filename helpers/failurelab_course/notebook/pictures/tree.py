"""A tree of questions, and where each run left it."""

from collections.abc import Mapping, Sequence
from typing import Any

ASKED, LEFT, WRONG = "#0072B2", "#222222", "#a3260d"


# The questions of notebook 11's `diagnose`, in order, with the causes that each can name; the last row is what is left.
FLAT_REWARD = (
    ("no gradient, and a reward between 0 and 1?", ("F10, one reward a group",)),
    (
        "first reward not the model's?",
        ("F11, answers cut", "F14, blind reward", "F7, garbage rollouts", "pays wrong answers"),
    ),
    ("no gradient?", ("F10, all wrong", "F10, all right")),
    ("weights as they were?", ("F1, no gradients", "F9, rounded away")),
    ("by hand, not what the log says?", ("F16, old engine",)),
    ("KL above 10?", ("F3b, other tokens",)),
    ("learning rate below 1e-5?", ("learning rate",)),
    ("", ("none of these",)),
)


def questions(
    axes: Any,
    runs: Mapping[str, Sequence[str]],
    asked: Sequence[tuple[str, Sequence[str]]] = FLAT_REWARD,
) -> None:
    """Draw questions one below the other, and to the right of each the causes that it names, with their runs.

    Args:
        axes: matplotlib's.
        runs: by cause, the runs that left the tree there.
        asked: each question, in order, with the causes that it can name. The last has no question: what is left over.
    """
    below = 0.0
    for question, causes in asked:
        y, below = below, below - max(1.0, 0.42 * len(causes) + 0.2)
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#e8f1f8", "edgecolor": ASKED}
        axes.text(
            0, y, question or "no question is left", ha="left", va="center", fontsize=9, bbox=box if question else None
        )
        axes.annotate("", xy=(3.95, y), xytext=(3.55, y), arrowprops={"arrowstyle": "-|>", "color": LEFT})
        if question:
            axes.text(3.72, y + 0.1, "yes", ha="center", va="bottom", fontsize=7.5)
            arrow = {"arrowstyle": "-|>", "color": LEFT}
            axes.annotate("", xy=(0.2, below + 0.3), xytext=(0.2, y - 0.3), arrowprops=arrow)
            axes.text(0.28, (y + below) / 2, "no", ha="left", va="center", fontsize=7.5)
        for row, cause in enumerate(causes):
            went = list(runs.get(cause, ()))
            accused = bool(question) and any("healthy" in run for run in went)
            axes.text(
                4.05, y - 0.42 * row, f"{'✗ ' if accused else ''}{cause}" + (f": {', '.join(went)}" if went else ""),
                ha="left", va="center", fontsize=8.5, color=WRONG if accused else LEFT,
                fontweight="bold" if went else "normal",
            )  # fmt: skip
    axes.set(xlim=(-0.1, 9.2), ylim=(below + 0.4, 0.5))
    axes.axis("off")
