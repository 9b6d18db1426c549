"""The tables about how long the course takes: its parts, and each notebook (benchmarks/times.py)."""

from typing import Any

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import markdown

SOURCE = "times"  # of the records that benchmarks/times.py makes
_PARTS = {
    "first": "until the first notebook opens, nothing there and nothing cached (`make lab`)",
    "set-up": "set-up, nothing there and nothing cached (`make setup`: {eras} library stacks)",
    "again": "set-up, once all is there",
    "course": "the course (`failurelab run`: all notebooks, two at once)",
    "proof": "the proof of the labs (`failurelab verify`)",
    "fast tests": "`make test-fast`, once set up",
    "tests": "`make test`, once set up",
}


def times(records: list[Record]) -> str:
    """Minutes of each part by the clock and of its processes, and what else the machine did."""
    parts = _select_parts(records)
    body = []
    for part, text in _PARTS.items():
        if metrics := parts.get(part):
            share = f"{metrics['others_share']:.0%}" if "others_share" in metrics else "-"
            text = text.format(eras=metrics.get("eras", 4))  # records from before they were counted are of four
            body.append([text, *(_minutes(metrics.get(name)) for name in ("minutes", "processor_minutes")), share])
        else:
            body.append([text, "not recorded", "", ""])
    if {"set-up", "tests"} <= parts.keys():
        whole = parts["set-up"]["minutes"] + parts["tests"]["minutes"]
        body.append(["CI from a clean clone: set-up and tests", _minutes(whole), "-", "-"])
    return markdown(["what", "minutes", "of processor time", "others took"], body)


def notebook_times(records: list[Record]) -> str:
    """Seconds and the largest process of each notebook, as one run of all of them reported."""
    metrics = _select_parts(records).get("course")
    if metrics is None:
        return "not recorded"
    runs = zip(metrics["notebooks"], metrics["seconds"], metrics["peak_mib"], strict=True)
    body = [[name[:2], f"{seconds:.0f}", f"{peak:.0f}"] for name, seconds, peak in runs]
    return markdown(["notebook", "seconds to run", "largest process, MiB"], body)


def _minutes(value: float | None) -> str:
    if value is None:
        return "-"
    return "under 0.01" if value < 0.01 else f"{value:.{1 if value >= 0.05 else 2}f}"


def _select_parts(records: list[Record]) -> dict[str, dict[str, Any]]:
    return {r["case"].removeprefix("how long: "): r["figures"] for r in records if r["source"] == SOURCE}
