"""The tables of docs/preflight.md: what preflight said of a corpus of scripts."""

import pandas

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import count, median, select_runs, table


def preflight(records: list[Record]) -> str:
    """What preflight said of the corpus, by failure: named, first, said falsely; and of healthy scripts."""
    runs = select_runs(records, "ground", "preflight: (?P<name>.+)")
    if runs.empty:
        return "Not recorded: `make corpus`."
    expected = [_ids(text) for text in runs["expected"]]
    found = [_ids(text) for text in runs["found"]]
    allowed = [ids | _ids(text) for ids, text in zip(expected, runs["also_allowed"])]
    failures = sorted(set().union(*expected, *found), key=lambda failure: (len(failure), failure))

    def line(failure: str) -> tuple[str, dict[str, str]]:
        have = [failure in ids for ids in expected]
        named = sum(failure in ids for ids, has in zip(found, have) if has)
        falsely = sum(failure in ids and failure not in may for ids, may in zip(found, allowed))
        first = runs[runs["expected"].str.split(", ").str[0] == failure]
        worst = count(first["first"]) if len(first) else "-"
        return failure, {"named": f"{named} of {sum(have)}", "first": worst, "false": str(falsely)}

    broken = runs[runs["expected"] != "none"]
    healthy = runs[runs["expected"] == "none"]
    lines = [line(failure) for failure in failures]
    lines += [(f"broken scripts, {half}", _all(broken[broken["half"] == half])) for half in sorted(set(runs["half"]))]
    said = {"named": "-", "first": "-", "false": count(~healthy["nothing_false"].astype(bool))}
    lines.append((f"healthy scripts, {len(healthy)}", said))
    lines.append(("seconds, median", {"named": median(runs["seconds"], ".0f"), "first": "", "false": ""}))
    columns = (("named", "named"), ("named first, where it is the worst", "first"), ("said falsely", "false"))
    return table(["failure"], lines, *((head, lambda cells, key=key: cells[key]) for head, key in columns))


def preflight_time(records: list[Record]) -> str:
    """What preflight costs as a whole process, beside the imports that the script itself would need, and per stack."""
    runs = select_runs(records, "ground", "preflight, whole: .+")
    if runs.empty:
        return "Not recorded: `benchmarks/preflight_time.py`."
    columns = (
        ("seconds, median of five", "seconds"),
        ("of these, the imports", "seconds_of_imports_alone"),
        ("peak memory, MiB", "peak_mib"),
    )
    lines = [(row["stack"], row) for _, row in runs.sort_values("stack", ascending=False).iterrows()]
    columns = tuple((head, lambda row, key=key: f"{row[key]:g}") for head, key in columns)
    answers = ("answers of five seeds", lambda row: "one" if len(row["answers_of_five_seeds"]) == 1 else "several")
    return table(["stack"], lines, *columns, answers)


def _ids(text: str) -> set[str]:
    return set(text.split(", ")) - {"", "none"}


def _all(runs: pandas.DataFrame) -> dict[str, str]:
    return {
        "named": count(runs["named"]),
        "first": count(runs["first"]),
        "false": count(~runs["nothing_false"].astype(bool)),
    }
