"""What a training step holds at its peak: a bar for each run, split by the operation that allocated each block."""

from collections.abc import Mapping, Sequence

from failurelab_course.notebook import display as notebook

# The look of each part, told apart in print too: colour and hatch.
LOOKS = {
    "gradient of the first slice": ("#D55E00", "//"),
    "gradient of the second slice": ("#E69F00", ".."),
    "the rest": ("#bbbbbb", ""),
}


def split(blocks: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Return how much of each part (`LOOKS`) a run holds.

    Args:
        blocks: each block at the peak, in MiB, with the operation that allocated it, as `held_at_peak` tells it. The
            gradient of a slice is as large as what was cut, so that the first slice's is the larger of two.
    """
    slices = sorted((size for size, operation in blocks if operation == "SliceBackward0"), reverse=True)
    first, second = [*slices, 0.0, 0.0][:2]
    return dict(zip(LOOKS, (first, second, sum(size for size, _ in blocks) - first - second)))


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
