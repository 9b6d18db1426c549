"""The table of docs/offline.md: what a bundle takes, and what installing it took with the network cut."""

from collections.abc import Iterable

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import markdown


def offline(records: Iterable[Record]) -> str:
    """Return the table of the last `make pack-test` whose ledger was kept."""
    runs = [record["figures"] for record in records if record["source"] == "pack"]
    if not runs:
        return "not recorded"
    run = runs[-1]
    return markdown(
        ["", f"Python {run['python']}, {run['platform']}, torch {run['torch']}"],
        [
            ["bundle", f"{run['bundle_mb']:.0f} MB, {run['wheels']} wheels of {run['eras']} eras"],
            ["`install.sh`", f"it computed for {run['install_processor_minutes']:.1f} minutes"],
            ["disk after it", f"{run['installed_gb']:.1f} GB"],
        ],
    )
