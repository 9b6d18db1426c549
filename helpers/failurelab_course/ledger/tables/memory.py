"""Tables that hold a prediction against a measurement, and benchmarks of a card: from the CPU's ledger and from cards'.

A card's ledger is any `evidence/NAME.json` with records of tier gpu. Where there is none, a table says so.
"""

from collections.abc import Callable, Iterable

import pandas

from failurelab_course.ledger.records import Record, read_cards
from failurelab_course.ledger.tables import list_runs, select_runs, table
from failurelab_course.ledger.tables.machines import LOG_PROBS

_NO_CARD = "No GPU ledger yet: on a card this is NOT RUN."


def predicted(records: list[Record], cards: list[Record] | None = None) -> str:
    """Peak memory by hand, by simulation and as measured, for the CPU and for each card."""
    cards = read_cards() if cards is None else cards
    return _by_device([*records, *cards], "predicted: (?P<step>.+)", _predicted)


def card_log_probs(records: list[Record], cards: list[Record] | None = None) -> str:
    """Ways to score a completion on each card: time by events and peak memory, against kept logits in the same run."""
    return _by_device(read_cards() if cards is None else cards, LOG_PROBS, _log_probs)


def _by_device(records: Iterable[Record], pattern: str, make_table: Callable[[pandas.DataFrame], str]) -> str:
    """Return a table for each device, the CPU first; where there is no card, a line says so."""
    runs = select_runs(records, "F3a", pattern)
    devices = [] if runs.empty else list(runs.groupby(["tier", "device"]))
    parts = [f"Measured on: {device} (tier: {tier})\n\n{make_table(runs)}" for (tier, device), runs in devices]
    return "\n\n".join(parts if any(tier == "gpu" for (tier, _), _ in devices) else [*parts, _NO_CARD])


def _predicted(runs: pandas.DataFrame) -> str:
    def measured(run):
        return _not_run(run) or f"{run['measured_mib']:.1f}"

    return table(
        ["MiB beyond the weights"],
        list_runs(runs, "step"),
        ("by hand", "arithmetic_mib", ".1f"),
        ("simulated", "predicted_mib", ".1f"),
        ("measured", measured),
        ("by hand / measured", "arithmetic_ratio", ".3f"),
        ("simulated / measured", "ratio", ".3f"),
    )


def _log_probs(runs: pandas.DataFrame) -> str:
    return table(
        ["batch x (prompt + completion)", "way"],
        list_runs(runs.sort_values(["shape", "way"]), "shape", "way"),
        ("ms", lambda run: _not_run(run) or f"{1000 * run['seconds']:.1f}"),
        ("time, to kept", "time_to_kept"),
        ("peak, MiB", "peak_mib", ".0f"),
        ("beyond gradients, to kept", "memory_to_kept"),
    )


def _not_run(run: dict) -> str:
    return f"NOT RUN: {run['figures']['not_run']}" if "not_run" in run["figures"] else ""
