"""The tables of the labs' other cures and of their thresholds (benchmarks/lab_cures.py, lab_thresholds.py)."""

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import markdown

_CASE, _THRESHOLD = "cures of lab ", "threshold of lab "


def lab_cures(records: list[Record]) -> str:
    """How many cures of each lab that its author did not have in mind the checker passes; their names would tell."""
    found = {r["case"].removeprefix(_CASE): r for r in records if r["case"].startswith(_CASE)}
    if not found:
        return "not recorded"
    body = []
    for number, record in sorted(found.items()):
        results = record["figures"]["results"]
        body.append([number, f"{results.count('PASS')} of {len(results)}"])
    return markdown(["lab", "other cures that pass"], body)


def lab_thresholds(records: list[Record]) -> str:
    """Each threshold of a healthy run that chance can move: what broken scripts and solutions measured beside it."""
    body = []
    for record in sorted(records, key=lambda record: record["case"]):
        if not record["case"].startswith(_THRESHOLD):
            continue
        figures = record["figures"]
        sides = (
            f"{min(values):.3g} to {max(values):.3g}" if values else "-"
            for values in (figures["broken"], figures["solution"])
        )
        passed = f"{figures['solutions_that_pass']} of {figures['seeds']}"
        number = record["case"].removeprefix(_THRESHOLD)[:2]
        body.append([number, f"`{figures['check']}`", *sides, f"{figures['spreads_to_solution']:.1f}", passed])
    if not body:
        return "not recorded"
    return markdown(["lab", "threshold", "broken", "solution", "spreads between", "solutions that pass"], body)
