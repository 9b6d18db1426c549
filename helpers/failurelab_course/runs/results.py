"""What became of the notebooks: one result each, an exit status, and a table with its denominators."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

STATUSES = ("PASS", "FAIL", "ENVIRONMENT", "NOT RUN")


@dataclasses.dataclass
class Result:
    """What became of one notebook. `cells` ran without error, `of` there are; `peak_bytes` is None where unknown."""

    name: str
    status: str
    reason: str
    cells: int
    of: int
    seconds: float
    peak_bytes: int | None
    parameters: dict[str, Any]
    copy: pathlib.Path
    html: pathlib.Path | None
    log: pathlib.Path
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether it held; a notebook that was not run did not."""
        return self.status == "PASS"

    def figures(self, **wanted: Any) -> dict[str, Any]:
        """Return the figures of the only record whose fields are as wanted, such as `state="healthy", era="today"`.

        Raises:
            LookupError: no record, or more than one, is so.
        """
        found = [record for record in self.records if all(record.get(k) == v for k, v in wanted.items())]
        if len(found) != 1:
            raise LookupError(f"{len(found)} of {len(self.records)} records of {self.name} have {wanted}")
        return found[0]["figures"]


def exit_status(results: Iterable[Result]) -> int:
    """Return 1 if any notebook failed; else 3 if the environment broke one, or if none passed at all; else 0.

    So 0 means: at least one passed, and whatever did not was NOT RUN for a reason that it gave and the table shows.
    """
    statuses = [result.status for result in results]
    if "FAIL" in statuses:
        return 1
    return 3 if "ENVIRONMENT" in statuses or "PASS" not in statuses else 0


def summary(results: Iterable[Result]) -> str:
    """Return one line with its denominator: `7 of 8 PASS, 1 NOT RUN`."""
    statuses = [result.status for result in results]
    counts = [(status, statuses.count(status)) for status in STATUSES]
    others = [f"{count} {status}" for status, count in counts[1:] if count]
    return ", ".join([f"{statuses.count('PASS')} of {len(statuses)} PASS", *others])


def to_json(results: Iterable[Result], ran: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what `results.json` holds.

    Args:
        results: of the notebooks.
        ran: what they computed on, of `ran_on.describe`.
    """
    results = list(results)
    listed = [dataclasses.asdict(each) for each in results]
    for each in listed:
        each |= {key: each[key] and str(each[key]) for key in ("copy", "html", "log")}
    return {
        "schema": 1,
        "ran_on": dict(ran or {}),
        "summary": summary(results),
        "exit_status": exit_status(results),
        "results": listed,
    }


def report(results: list[Result], out: pathlib.Path, ran: str = "") -> None:
    """Print the table of results, what they ran on, the line with the denominators, and where the copies are."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    styles = {"PASS": "green", "FAIL": "bold red", "ENVIRONMENT": "yellow", "NOT RUN": "cyan"}
    table = Table("notebook", "result", "cells", "seconds", "peak MiB")
    for each in results:
        peak = f"{each.peak_bytes / 2**20:.0f}" if each.peak_bytes else "-"
        status = f"[{styles[each.status]}]{each.status}"
        table.add_row(each.name, status, f"{each.cells} of {each.of}", f"{each.seconds:.0f}", peak)
    console.print(table)
    for each in results:
        if each.reason:
            console.print(f"{each.name}: {each.reason}", markup=False, highlight=False, soft_wrap=True)
    if ran:
        console.print(ran, markup=False, highlight=False, soft_wrap=True)
    console.print(summary(results), style="bold", highlight=False)
    with contextlib.suppress(ValueError):
        out = out.relative_to(pathlib.Path.cwd())
    console.print(f"Executed copies, HTML and evidence: {out}", highlight=False, soft_wrap=True)
