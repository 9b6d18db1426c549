#!/usr/bin/env python3
"""How often `failurelab diagnose` is right on runs whose cause is known, by what it is handed.

    python benchmarks/diagnose_grading.py [first|fresh|third …] [--keep]

The runs lie in the archives of `benchmarks/training_runs`. No script is handed in. `--keep` replaces what
`evidence/cpu/diagnose_grading.json` says of the graded parts, tools and levels: one record each, with the counts, and
the commit of the rules.

Eras: today.
"""

import argparse
import collections
import json
import pathlib
import re
import shutil
import tempfile

import archives
import frames
import recording
import tomllib

from failurelab.errors import FailureLabError
from failurelab_course.experiments import observe
from failurelab_preflight.diagnose import cli

HERE = pathlib.Path(__file__).resolve().parent
RUNS = HERE / "training_runs"
SUMMARY = HERE.parent / "evidence" / "cpu" / "diagnose_grading.json"
PARTS = ("first", "fresh", "third")
LOGS = ("trainer_state.json", "log.txt")
PROBES = "probes.json"  # what two checkpoints showed, which are too large to keep
FILES = (*LOGS, "versions.txt", PROBES)
LEVELS = {
    "log": LOGS,
    "all files": FILES,
    "all files and preflight": (*FILES, "preflight.json"),
}
CAUSE = re.compile(r"\bF\d+[a-z]?\b|\blearning_rate\b|\bbeta\b")


def judge(folder: pathlib.Path, names: tuple[str, ...]) -> dict | None:
    """Return the causes that diagnose names, what its looks tell apart, and its verdict; None without a file."""
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files or ("preflight.json" in names and not (folder / "preflight.json").is_file()):
        return None
    compared = compare(json.loads((folder / PROBES).read_text())) if folder / PROBES in files else None
    try:
        answer = cli.ask(folder.name, [file for file in files if file.name != PROBES], compared=compared)
    except FailureLabError:
        return {"causes": [], "looks": [], "abstained": True, "healthy": False}
    causes = [set(cause.named) for cause in answer.causes]
    looks = set(CAUSE.findall(" ".join(outcome for look in answer.looks for outcome in look.then)))
    return {"causes": causes, "looks": looks, "abstained": answer.abstained, "healthy": answer.healthy}


def compare(probes: dict) -> dict:
    """Return kept probes as `checkpoints.compare` returns them; of an adapter only its elements were kept."""
    adapter = probes.get("adapter_elements_changed")
    return {
        "tensors": probes["tensors"],
        "tensors_changed": probes["tensors_changed"],
        "tensors_share": 1.0 if adapter is not None else probes["tensors_changed"] / probes["tensors"],
        "elements_changed": probes["elements_changed"] if adapter is None else adapter,
        "weights_dtype": ", ".join(probes["dtypes"]),
        "adapter": adapter is not None,
    }


def count(runs: list[dict], answers: list[dict]) -> dict[str, int]:
    """Return how many answers stand how: of faulty runs, and of healthy ones."""
    counts = collections.Counter(dict.fromkeys(("faulty", "named_first", "named", "abstained",
        "abstained_with_the_cause", "wrongly_named", "called_healthy", "healthy", "false_alarms",
        "healthy_abstained"), 0))  # fmt: skip
    for run, answer in zip(runs, answers):
        expected, causes = set(run["expected"]), answer["causes"]
        if not expected:
            counts.update(healthy=1, false_alarms=bool(causes), healthy_abstained=answer["abstained"])
            continue
        right = [bool(cause & expected) for cause in causes]
        counts.update(
            faulty=1,
            named_first=any(right[:1]),
            named=any(right),
            abstained=answer["abstained"],
            abstained_with_the_cause=answer["abstained"] and bool(answer["looks"] & expected),
            wrongly_named=bool(causes) and not any(right),
            called_healthy=answer["healthy"],
        )
    return dict(counts)


def grade(part: str, folder: pathlib.Path) -> list[dict]:
    """Return one record for each level, on the runs of a part."""
    runs = tomllib.loads((folder.parent / f"{part}.toml").read_text())["run"]
    records = []
    for level, names in LEVELS.items():
        judged = [(run, answer) for run in runs if (answer := judge(folder / run["name"], names))]
        if not judged:
            continue
        figures = {"part": part, "tool": "diagnose", "level": level, "rules": recording.name_commit()} | count(
            *map(list, zip(*judged))
        )
        records.append(observe.record("ground", "measured", figures, case=f"diagnose: {part}: {level}"))
        print_confusion(judged)
    return records


def print_confusion(judged: list[tuple[dict, dict]]) -> None:
    """Print what was said first, by what was expected; ? is an abstention."""
    cells: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for run, answer in judged:
        first = answer["causes"][0] if answer["causes"] else {"healthy" if answer["healthy"] else "nothing"}
        said = " or ".join(sorted(first))
        cells[",".join(run["expected"]) or "healthy"][said + "?" * answer["abstained"]] += 1
    for expected, row in sorted(cells.items()):
        print(f"  {expected:14} {', '.join(f'{said} {times}' for said, times in row.most_common())}")


def keep(records: list[dict]) -> None:
    """Write the records into the summary, in place of those of the same case."""
    graded = {record["case"] for record in records}
    before = [record for record in recording.read_file(SUMMARY) if record["case"] not in graded]
    recording.write_file(SUMMARY, before + records)


def table_diagnose(folder: pathlib.Path) -> str:
    """What diagnose said of broken and of healthy runs, by what was handed in."""
    figures = {"broken": "faulty", "named, right": "named_first", "named, wrong": "wrongly_named",
               "abstained, looks tell": "abstained_with_the_cause", "nothing found": "called_healthy",
               "healthy": "healthy", "accused": "false_alarms", "abstained": "healthy_abstained"}  # fmt: skip
    runs = frames.read_runs(folder, "diagnose_grading", "diagnose: .+").fillna(0)
    sums = runs[[*figures.values()]].astype(int).groupby(runs["level"], sort=False).sum()
    return frames.markdown(["handed in", *figures], ([name, *row] for name, row in zip(sums.index, sums.to_numpy())))


def main() -> None:
    """Grade the parts at each level, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[*PARTS], metavar="PART")
    parser.add_argument("--keep", action="store_true", help="write the counts into evidence/cpu/diagnose_grading.json")
    options = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as name:
        for part in options.parts:
            folder = archives.unpack(RUNS / f"{part}.tar.xz", pathlib.Path(name))
            shutil.copy(RUNS / f"{part}.toml", name)
            records += grade(part, folder)
    for record in records:
        print(json.dumps(record["figures"]))
    if options.keep:
        keep(records)


if __name__ == "__main__":
    main()
