"""The table of the labs' other cures (benchmarks/lab_cures.py)."""

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import markdown

_CASE = "cures of lab "


def lab_cures(records: list[Record]) -> str:
    """The cures of each lab that its author did not have in mind, by name, and how many of them the checker passes."""
    found = {r["case"].removeprefix(_CASE): r for r in records if r["case"].startswith(_CASE)}
    if not found:
        return "not recorded"
    body = []
    for number, record in sorted(found.items()):
        names, results = record["figures"]["cures"], record["figures"]["results"]
        passed = results.count("PASS")
        body.append([number, record["failure"], ", ".join(names).replace("_", " "), f"{passed} of {len(names)}"])
    return markdown(["lab", "failure", "other cures", "passed"], body)
