"""The tables about updates that round to nothing: failure F9."""

import statistics

import pandas

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import count, markdown, select_runs, spread, table

_GRID = r"(?P<trained>full|LoRA|LoRA, adapters in bfloat16), (?P<dtype>bfloat16|float32), learning rate (?P<rate>\S+)"

_NONE = "Not recorded yet: `failurelab evidence record --only rounding`."


def _percent(values: pandas.Series) -> str:
    return spread([100 * value for value in values], ".2f") + " %"


def rounding(records: list[Record]) -> str:
    """Elements changed, predicted and real, by what is trained, dtype, learning rate and era."""
    runs = select_runs(records, "F9", _GRID)
    if runs.empty:
        return _NONE
    groups = runs.groupby(["trained", "dtype", "rate", "era"], sort=False)
    return table(
        ["what is trained", "model in", "learning rate", "era"],
        groups,
        ("predicted", lambda runs: _percent(runs["predicted"])),
        ("first step, real", lambda runs: _percent(runs["first_step"])),
        ("changed in the end", lambda runs: _percent(runs["changed"] / runs["elements"])),
        ("grad_norm", "grad_norm"),
        ("accuracy after", "accuracy_after"),
    )


def rounding_cures(records: list[Record]) -> str:
    """Each cure at the same learning rate: what changed, the reward's ends, and accuracy against no cure."""
    runs = select_runs(records, "F9", "cure: (?P<cure>.+)")
    if runs.empty:
        return _NONE
    groups = dict(list(runs.groupby("cure", sort=False)))
    none = groups["none"]["accuracy_after"]

    def verdict(runs: pandas.DataFrame) -> str:
        if len(runs) < 2:
            return "one seed, 20 steps"
        if (runs["error"] != "").any():
            return "ends in an error"
        noise = 3 * max(statistics.stdev(runs["accuracy_after"]), statistics.stdev(none))
        gain = runs["accuracy_after"].mean() - none.mean()
        return "better" if gain > noise else "worse" if gain < -noise else "no difference"

    return table(
        ["cure"],
        groups.items(),
        ("changed in the end", lambda runs: _percent(runs["changed"] / runs["elements"])),
        ("reward, first fifth", "first"),
        ("last fifth", "last"),
        ("accuracy after", "accuracy_after"),
        ("against none", verdict),
    )


def update_guard(records: list[Record]) -> str:
    """Runs with the failure and without, and what the guard said of them."""
    runs = select_runs(records, "F9", "(?!gap).*")
    if runs.empty:
        return _NONE
    runs = runs[runs["lost"].notna()]
    runs = runs.assign(lost=runs["lost"].astype(bool), alarm=runs["alarm"].astype(bool))
    lines = [
        [era, count(part[part["lost"]]["alarm"]), count(part[~part["lost"]]["alarm"])]
        for era, part in runs.groupby("era")
    ]
    return markdown(["era", "runs with the failure that it found", "healthy runs that it warned of"], lines)
