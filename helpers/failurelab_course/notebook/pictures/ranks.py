"""Which GPU is the current one in each rank, line by line of a script: a device map that is made too early, seen."""

from collections.abc import Sequence

from failurelab_course.notebook import display as notebook
from failurelab_course.notebook.pictures.loop import BROKEN, SOUND


def ranks(traces: Sequence[Sequence[tuple[str, int]]], reads: str, alt: str) -> None:
    """Show the current GPU of each rank over the lines of a script, and what the line `reads` found there.

    Args:
        traces: of each rank, the lines in order, each with the GPU that was current when it had run.
        reads: the line that makes the device map; the last line's GPU is the one that the rank trains on.
        alt: what it shows, as `notebook.show` wants it.
    """
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(traces), figsize=(8.5, 2.7), sharey=True, squeeze=False)
    for rank, (axes, trace) in enumerate(zip(all_axes[0], traces)):
        lines, gpus = zip(*trace)
        place, own = lines.index(reads), gpus[-1]
        right = gpus[place] == own
        color, mark = (SOUND, "o") if right else (BROKEN, "X")
        axes.axhline(own, color="#009E73", linestyle=":")
        axes.text(-0.4, own + 0.06, "it trains here", color="#00634a", fontsize=9)
        axes.step(range(len(lines)), gpus, where="mid", color="#0072B2", linestyle="-")
        axes.plot(place, gpus[place], mark, color=color, markersize=11)
        words = f"the map says GPU {gpus[place]}" + ("" if right else ": too early")
        axes.text(place, gpus[place] - 0.12, words, ha="center", va="top", color=color, fontsize=9, fontweight="bold")
        axes.set(title=f"rank {rank}", xlim=(-0.5, len(lines) - 0.5), ylim=(-0.5, len(traces) - 0.5))
        axes.set_xticks(range(len(lines)), lines, fontsize=8.5, rotation=15)
        axes.set_yticks(range(len(traces)), [f"GPU {number}" for number in range(len(traces))])
        axes.grid(False)
    all_axes[0][0].set_ylabel("current device")
    notebook.show(figure, alt)
