"""Tokens of a completion of several turns: who wrote each, what the loss takes, and the ids drawn beside the scored."""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

from failurelab_course.notebook import display as notebook

POLICY, TOOL, WRONG = "#cfe3f1", "#fbdcc4", "#a3260d"


@dataclasses.dataclass(frozen=True)
class Strip:
    """One completion, as it was drawn and as it was handed to the loss.

    Attributes:
        title: what it is called in the picture.
        drawn: ids in the order in which they came, a tool's among them.
        by_policy: of each of these, whether the policy drew it.
        scored: ids that the loss was handed.
        taken: of each of these, whether the loss takes it.
        texts: what an id is called, for all that occur.
    """

    title: str
    drawn: Sequence[int]
    by_policy: Sequence[bool]
    scored: Sequence[int]
    taken: Sequence[bool]
    texts: dict[int, str]


def who_wrote(strips: Sequence[Strip], alt: str) -> None:
    """Show each completion as two lines of tokens: as drawn, and below it as the loss was handed it.

    A token's ground says who wrote it, and so does its frame (dashed: the tool). A dot below a scored token says that
    the loss takes it. Where both lines first differ stands a mark.

    Args:
        strips: the completions.
        alt: what the picture shows, for those who do not see it.
    """
    from matplotlib import pyplot

    longest = max(len(ids) for strip in strips for ids in (strip.drawn, strip.scored))
    figure, panels = pyplot.subplots(len(strips), 1, figsize=(9, 1.75 * len(strips)), squeeze=False)
    for axes, strip in zip(panels[:, 0], strips):
        axes.set(xlim=(-2.2, longest), ylim=(-1.35, 2.5))
        axes.axis("off")
        axes.set_title(strip.title, loc="left", fontsize=10)
        _draw_line(axes, 1.25, "drawn", strip.drawn, strip.by_policy, strip.texts)
        written = [*strip.by_policy, *[True] * longest]
        writers = _writers(strip, written)
        _draw_line(axes, -0.35, "scored", strip.scored, writers, strip.texts)
        for place, (taken, own) in enumerate(zip(strip.taken, writers)):
            if taken:
                color = "#0072B2" if own else WRONG
                axes.text(place + 0.45, -0.62, "●" if own else "✗", ha="center", va="center", fontsize=8, color=color)
        apart = first_difference(strip.drawn, strip.scored)
        if apart is not None:
            axes.text(apart + 0.45, 0.86, "≠", ha="center", va="center", fontsize=13, color=WRONG, fontweight="bold")
    words = "blue, solid: the policy wrote it;  orange, dashed: the tool;  ● the loss takes it;  ✗ and should not"
    figure.text(0.5, 0.0, words, ha="center", va="bottom", fontsize=8.5)
    notebook.show(figure, alt)


def first_difference(drawn: Sequence[int], scored: Sequence[int]) -> int | None:
    """Return the first place at which two lists of ids differ; None if they are the same."""
    for place, (one, other) in enumerate(zip(drawn, scored)):
        if one != other:
            return place
    return None if len(drawn) == len(scored) else min(len(drawn), len(scored))


def _writers(strip: Strip, written: Sequence[bool]) -> list[bool]:
    """Return of each scored id whether the policy wrote it: by the line that was drawn, as far as both go along."""
    writers = [True] * len(strip.scored)
    matcher = difflib.SequenceMatcher(None, list(strip.drawn), list(strip.scored), autojunk=False)
    for block in matcher.get_matching_blocks():
        for step in range(block.size):
            writers[block.b + step] = bool(written[block.a + step])
    return writers


def _draw_line(
    axes: Any, height: float, label: str, ids: Sequence[int], by_policy: Sequence[bool], texts: dict[int, str]
) -> None:
    from matplotlib.patches import Rectangle

    axes.text(-0.3, height + 0.3, label, ha="right", va="center", fontsize=9)
    for place, (token, own) in enumerate(zip(ids, by_policy)):
        ground, frame = (POLICY, "-") if own else (TOOL, "--")
        axes.add_patch(Rectangle((place, height), 0.9, 0.62, facecolor=ground, edgecolor="#333333", linestyle=frame))
        axes.text(place + 0.45, height + 0.31, texts[token], ha="center", va="center", fontsize=8)
        axes.text(place + 0.45, height + 0.78, str(token), ha="center", va="center", fontsize=6, color="#555555")
