"""The rewards of one step, a row for each group: a group whose rewards are all equal teaches nothing."""

from collections.abc import Mapping, Sequence

from failurelab_course.notebook import display as notebook

RIGHT, WRONG, SILENT = "#0072B2", "#555555", "#a3260d"


def groups(panels: Mapping[str, Sequence[Sequence[float]]], alt: str) -> None:
    """Show the rewards of one step of several runs beside each other.

    Args:
        panels: by the run's name its groups, each a list with the reward of every completion; one above 0 is drawn as
            a filled dot, any other as a hollow one.
        alt: what the figure shows, as `notebook.show` wants it.
    """
    from matplotlib import pyplot

    tall = max(map(len, panels.values()))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(8.5, 0.21 * tall + 1.1), squeeze=False)
    for place, (name, rows) in zip(axes[0], panels.items()):
        silent = 0
        for height, rewards in enumerate(rows):
            equal = max(rewards) - min(rewards) < 1e-6
            silent += equal
            if equal:
                place.plot([-0.6, len(rewards) - 0.4], [height] * 2, color=SILENT, lw=1.2, ls="-")
                place.text(len(rewards) - 0.1, height, "=", color=SILENT, va="center", fontweight="bold")
            for column, reward in enumerate(rewards):
                face = RIGHT if reward > 0 else "white"
                edge = RIGHT if reward > 0 else WRONG
                place.plot(column, height, "o", ms=6.5, mfc=face, mec=edge, mew=1.1)
        place.set(xlim=(-0.9, len(rows[0]) + 0.8), ylim=(len(rows) - 0.4, -0.6), xticks=[], yticks=[])
        place.set_title(f"{name}\n{silent} of {len(rows)} groups silent", fontsize=10.5)
        place.set_xlabel(f"{len(rows[0])} completions", fontsize=9.5)
        place.spines[:].set_visible(False)
        place.grid(False)
    axes[0][0].set_ylabel("groups, one prompt each", fontsize=9.5)
    notebook.show(figure, alt)
