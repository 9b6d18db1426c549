"""The tables of docs/faults.md: what each fault did (`make faults`), and what stayed after an endurance run."""

from typing import Any

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import markdown

SOURCE, ENDURANCE = "faults", "benchmarks/endurance.py"


def faults(records: list[Record]) -> str:
    """Each fault with the line that is shown; what was lost and left is 0, or the test had failed."""
    found = _select(records, SOURCE, "fault: ")
    if not found:
        return "not recorded"
    body = []
    for what, figures in found.items():
        if "not_run" in figures:
            body.append([what, figures["how"], f"NOT RUN: {figures['not_run']}", "", "", "", ""])
            continue
        cells = [figures[name] for name in ("line", "status", "lost", "left", "again")]
        body.append([what, figures["how"], *cells])
    head = ["fault", "how it is made to happen", "line shown", "exit status", "lost", "left running", "second run"]
    ran = sum("not_run" not in figures for figures in found.values())
    return f"{ran} of {len(found)} faults were tried.\n\n" + markdown(head, [map(_cell, line) for line in body])


def endurance(records: list[Record]) -> str:
    """What was there before and after the checks, kernels and cells of the last endurance run."""
    body = []
    for what, figures in _select(records, ENDURANCE, "endurance: ").items():
        held = [
            f"{figures[f'{name}_before']:.0f} → {figures[f'{name}_after']:.0f}"
            for name in ("processes", "files", "mib", "temporary")
        ]
        left = ", ".join(f"{figures[f'{name}_left']}" for name in ("processes", "files", "temporary"))
        body.append([what, f"{figures['done']} of {figures['asked']}", f"{figures['minutes']:.1f}", *held, left])
    head = ["what", "done", "minutes", "processes", "open files", "memory, MiB", "temporary files", "left at the end"]
    return markdown(head, body) if body else "not recorded"


def _select(records: list[Record], source: str, prefix: str) -> dict[str, dict[str, Any]]:
    return {r["case"].removeprefix(prefix): r["figures"] for r in records if r["source"] == source}


def _cell(value: Any) -> str:
    """Return what a table's cell can hold: no bar, and nothing that Markdown or HTML would read."""
    return str(value).replace("|", "¦").replace("<", "&lt;").replace("*", "\\*")
