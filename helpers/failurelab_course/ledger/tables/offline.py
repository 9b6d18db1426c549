"""The table of docs/offline.md: what a bundle takes, and what installing it took with the network cut."""

from collections.abc import Iterable

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import markdown


def offline(records: Iterable[Record]) -> str:
    """Return the table of the last `make pack-test` whose ledger was kept."""
    runs = [made["figures"] for made in records if made["source"] == "pack"]
    if not runs:
        return "not recorded"
    found = runs[-1]
    return markdown(
        ["", f"Python {found['python']}, {found['platform']}, torch {found['torch']}"],
        [
            ["bundle", f"{found['bundle_mb']:.0f} MB, {found['wheels']} wheels of {found['eras']} eras"],
            ["`install.sh`", f"it computed for {found['install_processor_minutes']:.1f} minutes"],
            ["disk after it", f"{found['installed_gb']:.1f} GB"],
        ],
    )
