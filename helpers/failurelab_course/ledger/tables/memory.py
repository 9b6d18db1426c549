"""Tables that hold a prediction against a measurement, and benchmarks of a card: from the CPU's ledger and from cards'.

A card's ledger is any `evidence/NAME.json` with records of tier gpu. Where there is none, a table says so.
"""

import itertools
import pathlib
from collections.abc import Iterable

from failurelab_course import eras
from failurelab_course.ledger import records as evidence
from failurelab_course.ledger.format import markdown
from failurelab_course.ledger.records import Record

_NO_CARD = "No GPU ledger yet: on a card this is NOT RUN."
_PREDICTED, _WAY = "predicted: ", "log-probs: "


def of_cards(folder: pathlib.Path | None = None) -> list[Record]:
    """Return the records of tier gpu of all ledgers in a folder, by default evidence/."""
    folder = folder or eras.root() / "evidence"
    ledgers = [evidence.load(path) for path in sorted(folder.glob("*.json")) if path.name != "cpu.json"]
    return [made for made in itertools.chain(*ledgers) if made["tier"] == "gpu"]


def predicted(records: list[Record], cards: list[Record] | None = None) -> str:
    """Peak memory by hand, by simulation and as measured, for the CPU and for each card."""
    cards = of_cards() if cards is None else cards
    parts = [_heading(device) + _predicted(made) for device, made in _by_device([*records, *cards], _PREDICTED)]
    return "\n\n".join([*parts, *([] if any(_of(cards, _PREDICTED)) else [_NO_CARD])])


def card_log_probs(records: list[Record], cards: list[Record] | None = None) -> str:
    """Ways to score a completion on each card: time by events and peak memory, against kept logits in the same run."""
    cards = of_cards() if cards is None else cards
    parts = [_heading(device) + _log_probs(made) for device, made in _by_device(cards, _WAY)]
    return "\n\n".join(parts or [_NO_CARD])


def _of(records: Iterable[Record], start: str) -> Iterable[Record]:
    return (made for made in records if made["case"].startswith(start) and made["source"].startswith("benchmarks/"))


def _by_device(records: Iterable[Record], start: str) -> Iterable[tuple[tuple[str, str], list[Record]]]:
    """Yield (tier, device) and its records, the CPU first."""
    devices: dict[tuple[str, str], list[Record]] = {}
    for made in _of(records, start):
        devices.setdefault((made["tier"], made["device"]), []).append(made)
    return sorted(devices.items())


def _heading(device: tuple[str, str]) -> str:
    return f"Measured on: {device[1]} (tier: {device[0]})\n\n"


def _predicted(records: list[Record]) -> str:
    body = []
    for made in records:
        found = made["figures"]
        body.append(
            [
                made["case"].removeprefix(_PREDICTED),
                *(_number(found.get(f"{side}_mib"), 1) for side in ("arithmetic", "predicted")),
                f"NOT RUN: {found['not_run']}" if "not_run" in found else _number(found["measured_mib"], 1),
                *(_number(found.get(name), 3) for name in ("arithmetic_ratio", "ratio")),
            ]
        )
    head = ["MiB beyond the weights", "by hand", "simulated", "measured", "by hand / measured", "simulated / measured"]
    return markdown(head, body)


def _log_probs(records: list[Record]) -> str:
    body = []
    for made in records:
        found = made["figures"]
        way, _, shape = made["case"].removeprefix(_WAY).rpartition(", width")[0].rpartition(", ")
        shape = made["case"].removeprefix(f"{_WAY}{way}, ")
        if "not_run" in found:
            body.append([shape, way, f"NOT RUN: {found['not_run']}", "", "", ""])
            continue
        numbers = (1000 * found["seconds"], found["time_to_kept"], found["peak_mib"], found["memory_to_kept"])
        body.append([shape, way, *(_number(each, places) for each, places in zip(numbers, (1, 2, 0, 2)))])
    head = ["batch x (prompt + completion)", "way", "ms", "time, to kept", "peak, MiB", "beyond gradients, to kept"]
    return markdown(head, sorted(body))


def _number(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"
