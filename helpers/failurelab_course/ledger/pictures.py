"""The pictures made from the ledger by `failurelab evidence tables`; each carries a digest of what it shows."""

import hashlib
import json
import pathlib
import statistics

from failurelab_course.ledger.format import of
from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables.machines import misaligned
from failurelab_course.ledger.tables.training import CURVES


def picture_digest(records: list[Record]) -> str:
    """Return a digest of what the picture shows, which the picture carries, so that a stale one is found."""
    shown = [
        [made["case"], made["seed"], made["figures"]] for name in CURVES for made in of(records, "F7", f"curve: {name}")
    ]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def picture(records: list[Record], path: pathlib.Path) -> None:
    """Draw the learning curves of the run that is broken twice: the median over seeds, and all seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from failurelab_course.notebook import display as notebook

    with pyplot.style.context(notebook.STYLE):
        figure, axes = pyplot.subplots(figsize=(7.5, 4))
        for number, name in enumerate(CURVES):
            runs = [made["figures"] for made in of(records, "F7", f"curve: {name}")]
            columns = list(zip(*(run["rewards"] for run in runs)))
            wide = {"linewidth": 7, "alpha": 0.35} if number == 0 else {}
            (line,) = axes.plot(runs[0]["steps"], [statistics.median(c) for c in columns], label=name, **wide)
            low, high = ([pick(column) for column in columns] for pick in (min, max))
            axes.fill_between(runs[0]["steps"], low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(xlabel="step", ylabel="reward, mean of 10 steps", ylim=(0, 0.9))
        axes.set_title("The same run, broken twice: one repair alone does not heal")
        axes.legend(loc="upper left", ncol=2)
        figure.savefig(path, metadata={"Software": None, "Description": picture_digest(records)})
        pyplot.close(figure)


def misalignment_digest(records: list[Record]) -> str:
    """Return a digest of what the picture of the misaligned runs shows."""
    shown = [[name, era, runs] for name, era, runs in misaligned(records)]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def misalignment_picture(records: list[Record], path: pathlib.Path) -> None:
    """Draw the learning curves with right and wrong log-probabilities: the median over seeds, and all as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from failurelab_course.notebook import display as notebook

    with pyplot.style.context(notebook.STYLE):
        figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
        for number, (name, era, runs) in enumerate(misaligned(records)):
            columns = list(zip(*(run["rewards"] for run in runs)))
            wide = {"linewidth": 7, "alpha": 0.35} if number == 0 else {}
            middle = [statistics.median(column) for column in columns]
            (line,) = axes.plot(runs[0]["steps"], middle, label=f"{era}, {name}", **wide)
            low, high = ([pick(column) for column in columns] for pick in (min, max))
            axes.fill_between(runs[0]["steps"], low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(xlabel="step", ylabel="reward, mean of 10 steps", ylim=(0, 1))
        axes.set_title("One upgrade, no error: what the trainer scores are other tokens")
        axes.legend(loc="center right")
        figure.savefig(path, metadata={"Software": None, "Description": misalignment_digest(records)})
        pyplot.close(figure)
