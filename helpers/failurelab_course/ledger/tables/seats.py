"""The table about a class on one server: what seats take that run a notebook at once (tests/hub/measure.py)."""

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import markdown
from failurelab_course.teaching.seats import SOURCE


def seats(records: list[Record]) -> str:
    """Memory, processor seconds and time of a seat, for each size of a class that was held."""
    runs = [made["figures"] for made in records if made["source"] == SOURCE]
    alone = {run["notebook"]: run["seconds"] for run in runs if run["seats"] == 1}
    body = []
    for run in sorted(runs, key=lambda run: (run["notebook"], run["seats"])):
        slower = f"{run['seconds'] / alone[run['notebook']]:.1f}" if run["notebook"] in alone else "-"
        body.append(
            [
                run["notebook"],
                run["seats"],
                f"{run['own_mib']:.0f}",
                f"{run['shared_mib']:.0f}",
                f"{run['together_mib']:.0f}",
                f"{run['largest_data_mib']:.0f}",
                f"{run['cpu_seconds']:.0f}",
                f"{run['seconds']:.0f}",
                slower,
                f"{run['others_share']:.0%}",
            ]
        )
    head = [
        "notebook",
        "seats at once",
        "a seat's own, MiB",
        "shared, MiB",
        "all together, MiB",
        "largest process, MiB",
    ]
    return markdown([*head, "processor seconds a seat", "seconds", "to one seat", "others took"], body)
