"""The tables about how long the course takes: its parts, and each notebook (benchmarks/times.py)."""

from typing import Any

from failurelab_course.ledger.format import markdown
from failurelab_course.ledger.records import Record

SOURCE = "times"  # of the records that benchmarks/times.py makes
_PARTS = {
    "set-up": "set-up, nothing there and nothing cached (`make setup`: four library stacks)",
    "again": "set-up, once all is there",
    "course": "the course (`failurelab run`: nine notebooks, two at once)",
    "proof": "the proof of the labs (`failurelab verify`)",
    "tests": "`make test`, once set up",
}


def times(records: list[Record]) -> str:
    """Minutes of each part by the clock and of its processes, and what else the machine did."""
    found = _found(records)
    body = []
    for part, told in _PARTS.items():
        if (run := found.get(part)) is None:
            body.append([told, "not recorded", "", ""])
            continue
        took = [_minutes(run[key]) if key in run else "-" for key in ("minutes", "processor_minutes")]
        body.append([told, *took, f"{run['others_share']:.0%}" if "others_share" in run else "-"])
    return markdown(["what", "minutes", "of processor time", "others took"], body)


def _minutes(value: float) -> str:
    return "under 0.01" if value < 0.01 else f"{value:.{1 if value >= 0.05 else 2}f}"


def notebook_times(records: list[Record]) -> str:
    """Seconds and the largest process of each notebook, as one run of all of them reported."""
    run = _found(records).get("course")
    if run is None:
        return "not recorded"
    body = [
        [name[:2], f"{seconds:.0f}", f"{peak:.0f}"]
        for name, seconds, peak in zip(run["notebooks"], run["seconds"], run["peak_mib"], strict=True)
    ]
    return markdown(["notebook", "seconds to run", "largest process, MiB"], body)


def _found(records: list[Record]) -> dict[str, dict[str, Any]]:
    return {r["case"].removeprefix("how long: "): r["figures"] for r in records if r["source"] == SOURCE}
