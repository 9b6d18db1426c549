"""What a recording did not run, and why: kept in the ledger beside what was measured, never counted as held.

A machine may lack what a part needs: no compiler for DeepSpeed's operation, no library of bitsandbytes for its CUDA, no
network. Such a part has no figures, and is no failure of the course. Anything else that ends badly is one.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from failurelab_course import eras
from failurelab_course.ledger import records as evidence

# An import or a build that this machine cannot do, as the last line of a run, or the reason of a lab's row.
_CANNOT = re.compile(
    r"No module named '?(deepspeed|bitsandbytes|liger_kernel)|MissingCUDAException|CUDA_HOME does not exist|"
    r"CUDAMismatchException|Ninja is required|libbitsandbytes"
)
_SAID = "NOT RUN: "
STATUS = 4  # a benchmark ends with it after a line that starts with NOT RUN


@dataclasses.dataclass(frozen=True)
class NotRun:
    """One part that was not run. `name` is what its records would have as their source; `era` is empty for any."""

    name: str
    reason: str
    era: str = ""


class CannotRun(evidence.EvidenceError):
    """This machine lacks what a benchmark needs; the message is the reason."""


def why(output: str, status: int) -> str:
    """Return why a benchmark that ended with `status` could not run here; empty if it failed."""
    last = (output.strip().splitlines() or [""])[-1].strip()
    if status == STATUS and last.startswith(_SAID):
        return last.removeprefix(_SAID)
    return last[:200] if _CANNOT.search(last) else ""


def lacks(reason: str) -> bool:
    """Whether the reason of a lab's row is something that this machine lacks."""
    return bool(_CANNOT.search(reason))


def unmet(needs: Iterable[str], era: eras.Era, device: str) -> str:
    """Return which need of a benchmark (a line `Needs: zero3, bitsandbytes` of its docstring) an era does not meet."""
    left_out = era.marker.get("left_out", [])
    for need in needs:
        package = "deepspeed" if need == "zero3" else need
        if package in left_out:
            return f"era {era.name} was made without {package}"
        if need == "zero3" and device == "cpu" and not era.has_zero3:
            return f"DeepSpeed's operation for the CPU is not built in era {era.name}"
    return ""


def read(ledger: Mapping[str, Any], where: str) -> list[NotRun]:
    """Return what a ledger's JSON says of parts not run; a ledger from before they were kept has none.

    Raises:
        EvidenceError: an entry without a name or a reason.
    """
    found = []
    for entry in ledger.get("not_run", []):
        try:
            found.append(NotRun(str(entry["name"]), str(entry["reason"]), str(entry.get("era", ""))))
        except (TypeError, KeyError, AttributeError) as error:
            raise evidence.EvidenceError(
                f"{where}: {entry!r} in not_run has no name or no reason. Next: record this evidence again."
            ) from error
    return found


def replace(old: Iterable[NotRun], new: Iterable[NotRun], measured: Iterable[evidence.Record]) -> list[NotRun]:
    """Return both together, without what has been measured or told anew."""
    new = list(new)
    again = {(each.name, each.era) for each in new} | {(made["source"], made["era"]) for made in measured}
    sources = {name for name, _ in again}
    kept = [each for each in old if (each.name, each.era) not in again and (each.era or each.name not in sources)]
    return sorted({*kept, *new}, key=lambda each: (each.name, each.era))
