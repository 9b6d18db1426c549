"""What a training step holds at its peak: a bar for each run, split into logits, their gradient and the rest."""

from collections.abc import Mapping

from failurelab_course.notebook import display as notebook

# The look of each part, told apart in print too: colour and hatch.
LOOKS = {
    "logits that are used": ("#009E73", ""),
    "logits that nobody uses": ("#D55E00", "//"),
    "their gradient": ("#E69F00", ".."),
    "the rest": ("#bbbbbb", ""),
}


def split(sizes: list[float], logits: float, gradient: float, used: float) -> dict[str, float]:
    """Return how much of each part a run holds, from the sizes of its blocks.

    Args:
        sizes: of all blocks at the peak, in MiB.
        logits: the size that a block of logits has, in MiB.
        gradient: the size that a block of their gradient has, in MiB.
        used: the share of the logits that is used.
    """
    held = {size: sum(block for block in sizes if abs(block - size) < 0.01) for size in (logits, gradient)}
    parts = [held[logits] * used, held[logits] * (1 - used), held[gradient], sum(sizes) - sum(held.values())]
    return dict(zip(LOOKS, parts))


def bars(runs: Mapping[str, Mapping[str, float]], title: str, alt: str) -> None:
    """Show a bar for each run.

    Args:
        runs: for each run's name the size of each part (`LOOKS`) in MiB.
        title: of the figure.
        alt: what it shows, as `notebook.show` wants it.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 1.3 + 0.42 * len(runs)))
    ends = [0.0] * len(runs)
    for part, (color, hatch) in LOOKS.items():
        sizes = [parts[part] for parts in runs.values()]
        axes.barh(list(runs), sizes, 0.65, ends, color=color, hatch=hatch, edgecolor="white", label=part)
        ends = [end + size for end, size in zip(ends, sizes)]
    for name, end in zip(runs, ends):
        axes.text(end + max(ends) * 0.01, name, f"{end:.0f}", va="center", fontsize=10)
    axes.set(xlabel="held at the peak, MiB", title=title, xlim=(0, max(ends) * 1.1))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=len(LOOKS), fontsize=9)
    notebook.show(figure, alt)
