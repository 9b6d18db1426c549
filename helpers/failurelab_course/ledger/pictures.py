"""The pictures that `failurelab evidence tables` makes from the ledger: learning curves, all seeds in a band."""

import hashlib
import json
import pathlib

import pandas

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import group_runs, select_runs
from failurelab_course.ledger.tables.machines import MISALIGNED
from failurelab_course.ledger.tables.training import CURVES

# Of each picture: the runs (failure, cases, a line for each label, and what makes a run's label), and how it is drawn.
PICTURES = {
    "silent.png": {
        "runs": ("F7", "curve: (?P<name>.+)", ("checkpointing off", "broken"), "name"),
        "names": ("healthy", "broken, without an error"),
        "title": "One GRPO script, run twice with one option changed",
        "height": 3.2,
        "top": 0.9,
        "legend": {"loc": "upper left"},
    },
    "rollouts.png": {
        "runs": ("F7", "curve: (?P<name>.+)", CURVES, "name"),
        "title": "The same run, broken twice: one repair alone does not heal",
        "height": 4,
        "top": 0.9,
        "legend": {"loc": "upper left", "ncol": 2},
    },
    "misalignment.png": {
        "runs": ("F3b", "misalignment: (?P<name>.+)", MISALIGNED, "era", "name"),
        "title": "One upgrade, no error: what the trainer scores are other tokens",
        "height": 3.6,
        "top": 1,
        "legend": {"loc": "center right"},
    },
}


def select_lines(name: str, records: list[Record]) -> dict[str, pandas.DataFrame]:
    """Return the runs of each line of a picture, by its label."""
    failure, pattern, *labels = PICTURES[name]["runs"]
    return group_runs(select_runs(records, failure, pattern), *labels)


def make_digest(name: str, records: list[Record]) -> str:
    """Return a digest of what a picture shows; the file carries it, so that a stale one is found."""
    lines = select_lines(name, records).values()
    if PICTURES[name]["runs"][0] == "F7":
        shown = [run for runs in lines for run in runs[["case", "seed", "figures"]].to_numpy().tolist()]
    else:
        shown = [[*runs[["name", "era"]].iloc[0], list(runs["figures"])] for runs in lines]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def draw_pictures(records: list[Record], folder: pathlib.Path) -> None:
    """Draw all pictures into files of a folder: the median over seeds, the first line wide, and all seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from failurelab_course.notebook import display

    for name, style in PICTURES.items():
        with pyplot.style.context(display.STYLE):
            figure, axes = pyplot.subplots(figsize=(7.5, style["height"]))
            lines = select_lines(name, records)
            for label, runs in zip(style.get("names", lines), lines.values()):
                rewards, steps = pandas.DataFrame(list(runs["rewards"])), runs["steps"].iloc[0]  # (seeds, steps)
                wide = {} if axes.lines else {"linewidth": 7, "alpha": 0.35}
                (line,) = axes.plot(steps, rewards.median(), label=label, **wide)
                band = {"color": line.get_color(), "alpha": 0.12, "linewidth": 0}
                axes.fill_between(steps, rewards.min(), rewards.max(), **band)
            axes.set(xlabel="step", ylabel="reward, mean of 10 steps", ylim=(0, style["top"]), title=style["title"])
            axes.legend(**style["legend"])
            figure.savefig(folder / name, metadata={"Software": None, "Description": make_digest(name, records)})
            pyplot.close(figure)
