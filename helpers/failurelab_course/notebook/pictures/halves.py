"""The tokens of a step in two processes that divide by their own number: each part counts for a half."""

from collections.abc import Sequence

from failurelab_course.notebook import display


def halves(tokens: Sequence[int], alt: str) -> None:
    """Show the tokens of two ranks from left to right, and upwards the weight of each beside the mean of the step.

    Args:
        tokens: how many each rank has.
        alt: what it shows, as `notebook.show` wants it.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2.6))
    axes.bar([0, tokens[0]], [sum(tokens) / 2 / own for own in tokens], tokens, align="edge", edgecolor="white",
             color=["0.45", "0.75"])  # fmt: skip
    axes.axhline(1, color="0.3", ls="--", label="all tokens alike")
    axes.set(xlabel="tokens of the step: the sums on rank 0, the rest on rank 1", ylabel="weight of a token",
             title="Two boxes of the same area")  # fmt: skip
    axes.legend()
    display.show(figure, alt)
