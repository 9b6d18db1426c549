"""The tables of docs/diagnose.md: what diagnose, and two other tools, said of runs whose cause is known."""

import collections

import pandas

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import select_runs, table, wilson

NOT_RECORDED = "Not recorded: `make runs-corpus`."
_FAULTY = (
    ("cause first", "is_right"), ("named first", "is_named"), ("among the first three", "is_in_three"),
    ("abstained with the right probe", "is_right_probe"), ("wrongly named", "is_wrong_name"),
    ("called healthy", "is_missed"),
)  # fmt: skip


def diagnose(records: list[Record]) -> str:
    """What diagnose said of faulty and of healthy runs, by half and by what it was handed, with 95 % intervals.

    Args:
        records: of the ledger; `rules` is the commit of the rules that judged.
    """
    runs = _runs(records)
    if runs.empty:
        return NOT_RECORDED
    lines = []
    runs = runs.assign(rules=runs["rules"].fillna("").replace("", "not frozen"))
    for (half, rules, level), group in runs.groupby(["half", "rules", "level"], sort=False):
        faulty, healthy = group[group["expected"] != "none"], group[group["expected"] == "none"]
        cells = {head: _share(faulty, key) for head, key in _FAULTY}
        cells |= {
            "false alarms": _share(healthy, "is_false_alarm"),
            "healthy, abstained": _share(healthy, "is_abstained"),
        }
        lines.append(((half, rules, level), cells))
    heads = [head for head, _ in _FAULTY] + ["false alarms", "healthy, abstained"]
    labels = ["half", "rules", "handed in"]
    return table(labels, lines, *((head, lambda cells, head=head: cells[head]) for head in heads))


def diagnose_confusion(records: list[Record]) -> str:
    """What diagnose said first, by the cause that a run has, with script and versions; ? is an abstention."""
    runs = _runs(records)
    if runs.empty:
        return NOT_RECORDED
    runs = runs[runs["level"] == "scalars, script, versions"]
    lines = []
    for (half, expected), group in runs.groupby(["half", "expected"], sort=False):
        said = collections.Counter(
            ("healthy" if run["is_right"] and expected == "none" else run["said"].split(", ")[0])
            + "?" * bool(run["is_abstained"])
            for _, run in group.iterrows()
        )
        lines.append(((half, expected), ", ".join(f"{name} {count}" for name, count in said.most_common())))
    lines.sort(key=lambda line: (line[0][0], len(line[0][1]), line[0][1]))
    return table(["half", "cause"], lines, ("said first", lambda text: text))


def diagnose_baselines(records: list[Record]) -> str:
    """What rldoctor and rlprobe said of the same scalars."""
    runs = select_runs(records, "ground", "baseline: (?P<tool>.+): (?P<name>.+)")
    if runs.empty:
        return NOT_RECORDED
    lines = []
    for (half, tool), group in runs.groupby(["half", "tool"], sort=False):
        faulty, healthy = group[group["expected"] != "none"], group[group["expected"] == "none"]
        lines.append(((half, tool), {
            "cause first": _share(faulty, "is_right"), "among the first three": _share(faulty, "is_in_three"),
            "nothing said": _share(faulty, "is_missed"), "false alarms": _share(healthy, "is_false_alarm"),
        }))  # fmt: skip
    heads = ("cause first", "among the first three", "nothing said", "false alarms")
    return table(["half", "tool"], lines, *((head, lambda cells, head=head: cells[head]) for head in heads))


def _runs(records: list[Record]) -> pandas.DataFrame:
    return select_runs(records, "ground", "diagnose: (?P<handed>.+): (?P<name>.+)")


def _share(runs: pandas.DataFrame, key: str) -> str:
    right, total = int(runs[key].fillna(False).astype(bool).sum()) if len(runs) else 0, len(runs)
    low, high = wilson(right, total)
    return f"{right} of {total} ({low:.0%} to {high:.0%})" if total else "-"
