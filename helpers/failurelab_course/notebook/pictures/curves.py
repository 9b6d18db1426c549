"""The figure of every story: one run broken, with the popular fix, repaired and healthy, as a benchmark has kept it.

Each is a mean over its seeds, and a band from the lowest to the highest. Whether a run is healed is read from here, and
never from the one run of a page.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from failurelab_course.notebook import display, records

# Look of a state in all notebooks: a label begins with its state. Those that often coincide differ in their width, and
# the thin one lies on the wide one, so that both are seen: a popular fix on the broken run, a repair on the healthy.
STYLES = {
    "broken": {"color": "#D55E00", "ls": "--", "lw": 4.5, "zorder": 2},
    "popular fix": {"color": "#CC79A7", "ls": "-", "lw": 1.4, "marker": "x", "zorder": 3},
    "repair": {"color": "#0072B2", "ls": "-", "lw": 1.4, "marker": "o", "ms": 4, "zorder": 3},
    "healthy": {"color": "#009E73", "ls": "--", "lw": 4.5, "zorder": 2},
}


class Runs(NamedTuple):
    """Runs that differ in their seeds alone: what each earns first and last, and by hand afterwards (or nothing)."""

    first: list[float]
    last: list[float]
    by_hand: list[float]

    @property
    def judged(self) -> list[float]:
        """What the runs are compared by: what the models do by hand, where that was measured."""
        return self.by_hand or self.last


def states(
    name: str,
    cases: Mapping[str, str | tuple[str, str]],
    alt: str = "",
    *,
    by_hand: float | None = None,
    beside: tuple[str, str] | None = None,
    reward: str = "reward",
) -> dict[str, Runs]:
    """Show runs of `evidence/cpu/NAME.json`, and a table of how they end; return them by label.

    Args:
        name: of the file.
        cases: by label the case of its records, or the case and the era. A label begins with its state, such as
            `popular fix: a cap`. The table compares all with the one that is healthy, or else repaired.
        alt: what the figure shows, as `notebook.show` wants it; by default, where each mean begins and ends.
        by_hand: what the untrained model earns, as a level line.
        beside: another figure of the runs, and what its axis says: drawn in a second panel, with a logarithmic axis.
        reward: what the reader's own metric is called.

    Raises:
        ValueError: a label begins with no state, or the file has no run of a case.
    """
    from matplotlib import pyplot

    stored, shown, means = records(name), {}, {}
    figure, panels = pyplot.subplots(1, 2 if beside else 1, squeeze=False, figsize=(9 if beside else 7.5, 3.6))
    axes, *others = panels[0]
    for label, case in cases.items():
        wanted = (case,) if isinstance(case, str) else case
        runs = [record["figures"] for record in stored if (record["case"], record["era"])[: len(wanted)] == wanted]
        style = next((style for state, style in STYLES.items() if label.startswith(state)), None)
        if not runs or style is None:
            raise ValueError(f"{label!r} begins with no state of {', '.join(STYLES)}, or {name} has no case {case!r}")
        steps, rewards = runs[0]["steps"], [run["rewards"] for run in runs]
        means[label] = _band(axes, steps, rewards, style, label)
        for panel in others:
            _band(panel, None, [run[beside[0]] for run in runs if run[beside[0]]], style, label)
        after = [float(run["accuracy_after"]) for run in runs if "accuracy_after" in run]
        shown[label] = Runs([curve[0] for curve in rewards], [curve[-1] for curve in rewards], after)
    if by_hand is not None:
        axes.axhline(by_hand, color="0.5", ls="-", lw=1, label="by hand, before (± 0.02)")
    axes.set(xlabel="step", ylabel=f"{reward}, mean of {steps[0]} steps", ylim=(0, None))
    axes.set_title("\n".join(coinciding(means)), fontsize=10)
    for panel in others:
        panel.set(xlabel="step", ylabel=beside[1], yscale="log")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    ends = [f"{label}: from {mean[0]:.2f} to {mean[-1]:.2f}" for label, mean in means.items()]
    display.show(figure, alt or f"Curves of the {reward} by step. {'; '.join(ends)}")
    _compare(shown, reward)
    return shown


def place(runs: Sequence[float], healthy: Sequence[float]) -> str:
    """Return where runs end beside healthy ones; a few seeds can say no more than that."""
    if max(runs) < min(healthy):
        return "below all of them"
    return "above all of them" if min(runs) > max(healthy) else "among them"


def coinciding(means: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a sentence for each two lines that lie on each other: nowhere more than a hundredth apart."""
    return [
        f"The lines of “{one}” and “{other}” coincide."
        for one, other in itertools.combinations(means, 2)
        if all(abs(left - right) < 0.01 for left, right in zip(means[one], means[other]))
    ]


def _band(axes: Any, steps: list[int] | None, runs: list[list[float]], style: Any, label: str) -> list[float]:
    """Draw the mean of runs, (seeds, places), and a band from the lowest to the highest; return the mean."""
    places = list(zip(*runs))
    steps, mean = steps or list(range(1, len(places) + 1)), list(map(statistics.fmean, places))
    axes.plot(steps, mean, label=label, **style)
    axes.fill_between(steps, list(map(min, places)), list(map(max, places)), color=style["color"], alpha=0.15, lw=0)
    return mean


def _compare(shown: Mapping[str, Runs], reward: str) -> None:
    """Show how the runs end, and where beside those that are healthy, or else repaired."""
    measure = next((label for state in ("healthy", "repair") for label in shown if label.startswith(state)), "")
    by_hand = any(runs.by_hand for runs in shown.values())
    columns = ["runs", "seeds", f"{reward} at the end", *["by hand afterwards"] * by_hand]
    rows = [
        [label, str(len(runs.last)), _spread(runs.last), *[_spread(runs.by_hand)] * by_hand]
        for label, runs in shown.items()
    ]
    if measure:
        columns.append(f"beside “{measure}”")
        for row in rows:
            row.append("" if row[0] == measure else place(shown[row[0]].judged, shown[measure].judged))
    display.verdict_table(rows, columns)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"
