"""What ZeRO-3 gathers and frees while a model generates, token by token: one bar for each whole model."""

from collections.abc import Mapping, Sequence

from failurelab_course.notebook import display as notebook


def gathers(runs: Mapping[str, tuple[Sequence[float], Sequence[float]]], alt: str) -> None:
    """Show for each run how much was gathered for each token, and how much was still held when the token was done.

    Args:
        runs: by title, two lists with an entry a token, both in whole models: what was gathered, and what was held.
        alt: what it shows, as `notebook.show` wants it.
    """
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(len(runs), 1, figsize=(8.5, 1.9 * len(runs)), sharex=True, squeeze=False)
    for axes, (title, (gathered, held)) in zip(all_axes[:, 0], runs.items()):
        tokens = range(1, len(gathered) + 1)
        axes.bar(tokens, gathered, width=0.55, color="#9fc9e5", edgecolor="#0072B2", label="gathered for the token")
        axes.plot(tokens, held, "D", color="#222222", markersize=5, label="still held after it")
        times = sum(value > 0.5 for value in gathered)
        axes.set_title(f"{title}: the whole model {times} time{'s' * (times != 1)}")
        axes.axhline(0, color="#444444", linewidth=0.8)
        axes.set(ylim=(-0.12, 1.25), yticks=(0, 1), xticks=(1, 6, 12, 18, 24), ylabel="whole models")
        axes.grid(False)
    all_axes[0][0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    all_axes[-1][0].set_xlabel("token")
    notebook.show(figure, alt)
