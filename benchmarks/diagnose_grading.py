#!/usr/bin/env python3
"""How often `failurelab diagnose` is right on runs whose cause is known, by what it is handed.

    python benchmarks/diagnose_grading.py [first|fresh|third …] [--baseline] [--rules COMMIT] [--keep]

The runs lie in the archives of `benchmarks/training_runs`. No script is handed in. `--keep` replaces what
`evidence/cpu/diagnose_grading.json` says of the graded parts, tools and levels: one record each, with the counts, and
the commit of the rules. `--baseline` judges the same `trainer_state.json` by rldoctor, in an environment of its own
under `.course/baselines`.

Eras: today.
"""

import argparse
import collections
import json
import pathlib
import re
import shutil
import subprocess
import sys
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
BASELINE = HERE.parent / ".course" / "baselines"
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
# Which causes a finding of rldoctor may mean, generously: what is not here names none of them.
MEANS = {
    "advantage_collapse": {"F10", "F14"},
    "length_pathology": {"F11", "F12", "F13"},
    "kl_drift": {"F19", "F3b"},
    "plateau": {"learning_rate", "F9", "F16", "F1", "F7", "beta"},
    "reward_composition": {"F14"},
}


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


def ask_rldoctor(folder: pathlib.Path, _: tuple[str, ...]) -> dict | None:
    """Return what rldoctor finds in a run's scalars at a warning or worse, as `judge` returns it."""
    state = folder / "trainer_state.json"
    if not state.is_file():
        return None
    line = [str(BASELINE / "bin" / "rldoctor"), "diagnose", str(state), "-f", "json"]
    asked = subprocess.run(line, capture_output=True, text=True)
    order = {"CRITICAL": 0, "WARNING": 1}
    findings = json.loads(asked.stdout)["findings"] if asked.stdout.strip() else []
    findings = sorted((f for f in findings if f["severity"] in order), key=lambda f: order[f["severity"]])
    causes = [MEANS.get(finding["detector"], {"none"}) for finding in findings]
    return {"causes": causes, "looks": set(), "abstained": False, "healthy": not causes}


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


def grade(part: str, folder: pathlib.Path, baseline: bool, commit: str) -> list[dict]:
    """Return one record for each level, and for the baseline, on the runs of a part."""
    runs = tomllib.loads((folder.parent / f"{part}.toml").read_text())["run"]
    asked = [("diagnose", level, judge, names) for level, names in LEVELS.items()]
    asked += [("rldoctor", "scalars", ask_rldoctor, ())] if baseline else []
    records = []
    for tool, level, ask, names in asked:
        judged = [(run, answer) for run in runs if (answer := ask(folder / run["name"], names))]
        if not judged:
            continue
        figures = {"part": part, "tool": tool, "level": level, "rules": commit} | count(*map(list, zip(*judged)))
        records.append(observe.record("ground", "measured", figures, case=f"{tool}: {part}: {level}"))
        if tool == "diagnose":
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


def install_baseline() -> None:
    """Make the environment of rldoctor, if it is not there."""
    if not (BASELINE / "bin" / "rldoctor").exists():
        uv = shutil.which("uv") or str(pathlib.Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "-q", str(BASELINE)], check=True)
        python = str(BASELINE / "bin" / "python")
        subprocess.run([uv, "pip", "install", "-q", "--python", python, "rldoctor==0.2.0"], check=True)


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
    parser.add_argument("--baseline", action="store_true", help="judge the same logs by rldoctor too")
    parser.add_argument("--rules", default="", help="the commit of the rules")
    parser.add_argument("--keep", action="store_true", help="write the counts into evidence/cpu/diagnose_grading.json")
    options = parser.parse_args()
    if options.baseline:
        install_baseline()
    records = []
    with tempfile.TemporaryDirectory() as name:
        for part in options.parts:
            folder = archives.unpack(RUNS / f"{part}.tar.xz", pathlib.Path(name))
            shutil.copy(RUNS / f"{part}.toml", name)
            records += grade(part, folder, options.baseline, options.rules)
    for record in records:
        print(json.dumps(record["figures"]))
    if options.keep:
        keep(records)


if __name__ == "__main__":
    main()
