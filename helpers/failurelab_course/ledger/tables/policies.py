"""The tables of notebook 10: importance weights by length, and the guard of the two engines."""

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import list_runs, select_runs, table

NOT_RECORDED = "Not recorded yet: `failurelab evidence record --out evidence/cpu.json --only two_policies`."


def weights(records: list[Record]) -> str:
    """Rounding alone: what one weight for a sequence, and one for each token, leave of a batch, by length."""
    runs = select_runs(records, "F17", "weights: (?P<engine>.+), (?P<tokens>\\d+) tokens")
    if runs.empty:
        return NOT_RECORDED
    runs = runs.assign(tokens=runs["tokens"].astype(int)).sort_values(["engine", "tokens"])
    return table(
        ["engine", "tokens"],
        list_runs(runs, "engine", "tokens"),
        ("mean gap, nats", lambda run: f"{run['gap']:.3f}"),
        (
            "weight: smallest, median, largest",
            lambda run: f"{run['smallest']:.3f}, {run['median']:.2f}, {run['largest']:.2f}",
        ),
        ("left out (above 3)", lambda run: f"{round(run['masked'] * run['sequences'])} of {run['sequences']}"),
        ("effective sample size", lambda run: f"{run['effective']:.2f}"),
        ("of those kept", lambda run: f"{run['effective_kept']:.2f}"),
        ("with one for each token", lambda run: f"{run['effective_token']:.3f}"),
    )


def engine_guard(records: list[Record]) -> str:
    """EngineMismatchGuard on runs with a fault, and on runs in which nothing is wrong."""
    runs = select_runs(records, "F16", "guard: (?P<name>.+)")
    if runs.empty:
        return NOT_RECORDED
    return table(
        ["run"],
        list_runs(runs, "name"),
        ("is", lambda run: run["expected"] or "healthy"),
        ("the guard says", lambda run: (run["looks_like"] or "another cause") if run["told"] else "nothing"),
        ("mean gap first, last", lambda run: _gaps(run)),
    )


def _gaps(run: dict) -> str:
    if run["gap_first"] is None or run["gap_first"] != run["gap_first"]:
        return "-"
    return f"{run['gap_first']:.3f}, {run['gap_last']:.3f}"
