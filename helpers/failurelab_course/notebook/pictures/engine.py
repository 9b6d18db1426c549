"""What a trainer asks of its engine, call by call, and whose weights the engine holds after each."""

from collections.abc import Iterable
from typing import Any

# How `vllm_stand_in.record_calls` names what the engine holds: words, a ground, a hatch.
HELD = {
    "trained": ("the trained weights", "#9ecae9", ""),
    "first": ("the first checkpoint", "#f3a58f", "///"),
    "lost": ("none", "#f4f4f4", ""),
    "other": ("other weights", "#e8d8a0", "..."),
}
WORDS = {
    "wake_up weights": "wake up",
    "load_weights": "sync",
    "reload_weights": "reload",
    "wake_up kv_cache": "cache",
    "generate": "draw",
    "sleep": "sleep",
}


def timeline(axes: Any, lines: Iterable[tuple[int, str, str]], title: str) -> None:
    """Draw the calls of the first two steps from left to right, above a bar: what the engine holds from each on.

    Args:
        axes: matplotlib's.
        lines: optimizer steps taken, call, and what the engine then holds, as `vllm_stand_in.record_calls` notes them.
        title: of the picture.
    """
    shown = [line for line in lines if line[0] in (1, 2)]
    for place, (step, call, holds) in enumerate(shown):
        words, ground, hatch = HELD[holds]
        axes.barh(0, 1, left=place, height=0.8, color=ground, edgecolor="white", hatch=hatch, linewidth=0)
        broken = call == "generate" and holds != "trained"
        axes.text(
            place, 0.65, ("✗ " if broken else "") + WORDS.get(call, call), ha="left", va="bottom", fontsize=9,
            color="#a3260d" if broken else "#222222", fontweight="bold" if call == "generate" else "normal",
        )  # fmt: skip
        axes.plot([place, place], [-0.4, 0.6], color="#222222", linewidth=1, linestyle="-")
        if not place or shown[place - 1][0] != step:
            axes.text(place, 1.15, f"after {step} optimizer step{'s' * (step > 1)}", fontsize=9)
    start = 0
    for place in range(1, len(shown) + 1):
        if place == len(shown) or shown[place][2] != shown[start][2]:
            words = HELD[shown[start][2]][0]
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
            axes.text((start + place) / 2, 0, words, ha="center", va="center", fontsize=8.5, bbox=ground)
            start = place
    axes.set(xlim=(-0.1, len(shown)), ylim=(-0.5, 1.6), title=title)
    axes.axis("off")
