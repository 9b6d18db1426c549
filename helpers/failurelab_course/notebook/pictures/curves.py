"""Learning curves that a benchmark has kept, a line for each seed."""

import json
from collections.abc import Mapping

from failurelab_course import eras
from failurelab_course.notebook import display as notebook


def curves(name: str, cases: Mapping[str, str], by_hand: float, title: str, alt: str) -> dict[str, list[list[float]]]:
    """Show runs of `evidence/cpu/NAME.json`; return their rewards, a list for each seed, by label.

    Args:
        name: of the file.
        cases: by label the case of its records; drawn in this order, each in a colour and a dash of its own.
        by_hand: what the untrained model earns, as a level line.
        title: of the figure.
        alt: what it shows, as `notebook.show` wants it.
    """
    from matplotlib import pyplot

    text = (eras.root() / "evidence" / "cpu" / f"{name}.json").read_text(encoding="utf-8")
    records = json.loads(text)["records"]
    figure, axes = pyplot.subplots()
    axes.axhline(by_hand, color="0.5", ls="-", label="by hand, before training")
    rewards: dict[str, list[list[float]]] = {}
    for (label, case), dash in zip(cases.items(), ("-", "--", "-.", ":")):
        runs = [record["figures"] for record in records if record["case"] == case]
        rewards[label] = [run["rewards"] for run in runs]
        for run in runs:
            axes.plot(
                run["steps"], run["rewards"], f"{dash}C{len(rewards) - 1}", label=None if run is not runs[0] else label
            )
    axes.set(xlabel="step", ylabel="reward, mean of 10 steps", ylim=(0, 0.85))
    axes.set_title(title)
    axes.legend(loc="upper left", ncols=2)
    notebook.show(figure, alt)
    return rewards
