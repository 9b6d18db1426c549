#!/usr/bin/env python3
"""How often `failurelab diagnose` is right on runs whose cause is known, by what it is handed.

    python benchmarks/diagnose_grading.py [first|fresh|third|labs] [--baselines] [--rules COMMIT] [--corpus FOLDER]

The runs stand in `benchmarks/runs`. Each is judged at four levels: its scalars alone; its log besides; with the script
and the versions; and all that it left, which includes what two checkpoints showed. A half that no rule was written on
is graded once: the ledger names the commit of the rules. `--baselines` judges the same `trainer_state.json` by rldoctor
and rlprobe, in an environment of their own under `.course/baselines`, and says so where they cannot be had.

Eras: today.
"""

import argparse
import collections
import json
import pathlib
import shutil
import subprocess
import sys
import time

import tomllib

from failurelab.diagnose import command
from failurelab.errors import FailureLabError
from failurelab_course.experiments import devices, observe
from failurelab_course.ledger.tables import wilson

HERE = pathlib.Path(__file__).resolve().parent
BASELINES = HERE.parent / ".course" / "baselines"
PACKAGES = ("rldoctor==0.2.0", "rlprobe==0.1.0")
SCALARS = ("trainer_state.json",)
LEVELS: dict[str, tuple[str, ...]] = {
    "scalars": SCALARS,
    "scalars and log": (*SCALARS, "log.txt"),
    "scalars, script, versions": (*SCALARS, "log.txt", "train.py", "versions.txt"),
    "all": (*SCALARS, "log.txt", "train.py", "versions.txt", "completions.jsonl", "completions.parquet", "probes.json"),
}
# What preflight said of the script besides: the probe that an abstention names, run.
LEVELS |= {f"{level}, preflight": (*LEVELS[level], "preflight.json") for level in ("scalars, script, versions", "all")}
# Which causes a finding of a baseline may mean, generously: what is not here names none of them.
MEANS = {
    "advantage_collapse": {"F10", "F14"},
    "length_pathology": {"F11", "F12", "F13"},
    "kl_drift": {"F19", "F3b"},
    "plateau": {"learning_rate", "F9", "F16", "F1", "F7", "beta"},
    "reward_composition": {"F14"},
    "DEGENERATE_GROUPS": {"F10", "F14"},
    "ADV_COLLAPSE": {"F10", "F14"},
    "REWARD_STD_DEATH": {"F10", "F14"},
    "TRUNCATION_STARVE": {"F11", "F12", "F13"},
    "REF_POLICY_DRIFT_ASYMMETRY": {"F19"},
    "KL_BLOWUP": {"F19", "F3b"},
}
PROBE = """
import json, sys, tempfile, types
module = types.ModuleType("transformers")
module.TrainerCallback = object
sys.modules.setdefault("transformers", module)
from rlprobe.doctor import diagnose
from rlprobe.integrations import trl
from rlprobe.recorder import Recorder
for path in sys.argv[1:]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(folder + "/run", algorithm="grpo")
            for entry in json.load(open(path))["log_history"]:
                recorder.log_step(entry["step"], **trl._map_logs(entry))
            recorder.close()
            found = [[f.signature_id, f.severity] for f in diagnose(folder + "/run")]
    except Exception as error:
        found = [["error", type(error).__name__ + ": " + str(error)[:100]]]
    print(json.dumps([path, found]), flush=True)
"""


def judge(folder: pathlib.Path, names: tuple[str, ...]) -> dict | None:
    """Return what diagnose says of a run's files; None if it left none of them."""
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        return None
    started = time.perf_counter()
    try:
        answered = command.ask(folder.name, files)
    except FailureLabError as error:
        return {"causes": [], "named": [], "healthy": False, "abstained": True, "error": str(error), "seconds": 0.0}
    return {
        "causes": [cause.failure for cause in answered.causes],
        "named": [cause.failure for cause in answered.causes if cause.weight >= command.rules.CONVICTS],
        "healthy": answered.healthy,
        "abstained": answered.abstained,
        "error": "",
        "seconds": time.perf_counter() - started,
    }


def grade(run: dict, told: dict) -> dict[str, bool]:
    """Return how an answer stands.

    Of a faulty run, whether its cause comes first, among the first three, or is said to be possible with its probe; of
    a healthy one, whether a cause is named.
    """
    expected = set(run["expected"])
    if not expected:
        return {"false_alarm": bool(told["named"]), "abstained": told["abstained"], "right": told["healthy"]}
    first, possible = told["causes"][:1], bool(expected & set(told["causes"]))
    return {
        "right": bool(expected & set(first)),
        "named": bool(expected & set(told["named"][:1])),
        "in_three": bool(expected & set(told["causes"][:3])),
        "abstained": told["abstained"],
        "right_probe": told["abstained"] and possible,
        "missed": told["healthy"],
        "wrong_name": bool(told["named"]) and not expected & set(told["named"]),
    }


def baselines(folders: list[pathlib.Path]) -> dict[str, dict[str, list[str]]]:
    """Return what rldoctor and rlprobe find in each run's scalars, at a warning or worse, worst first."""
    python = BASELINES / "bin" / "python"
    if not python.exists():
        uv = shutil.which("uv") or str(pathlib.Path(sys.executable).with_name("uv"))
        for line in (
            [uv, "venv", "-q", str(BASELINES)],
            [uv, "pip", "install", "-q", "--python", str(python), *PACKAGES],
        ):
            if subprocess.run(line).returncode:
                print(f"baselines NOT RUN: {' '.join(line)} failed")
                return {}
    paths = [folder / "trainer_state.json" for folder in folders if (folder / "trainer_state.json").is_file()]
    told: dict[str, dict[str, list[str]]] = {"rldoctor": {}, "rlprobe": {}}
    for path in paths:
        asked = subprocess.run(
            [str(BASELINES / "bin" / "rldoctor"), "diagnose", str(path), "-f", "json"], capture_output=True, text=True
        )
        try:
            findings = json.loads(asked.stdout)["findings"]
        except (ValueError, KeyError):
            findings = []
        order = {"CRITICAL": 0, "WARNING": 1}
        findings = sorted((f for f in findings if f["severity"] in order), key=lambda f: order[f["severity"]])
        told["rldoctor"][path.parent.name] = [finding["detector"] for finding in findings]
    asked = subprocess.run([str(python), "-c", PROBE, *map(str, paths)], capture_output=True, text=True)
    for line in asked.stdout.splitlines():
        path, found = json.loads(line)
        if found[:1] and found[0][0] == "error":
            print(f"rlprobe could not read {path}: {found[0][1]}")
            continue
        kept = [name for name, severity in found if severity in ("warn", "critical")]
        told["rlprobe"][pathlib.Path(path).parent.name] = kept
    return told


def main() -> None:
    """Judge a half at each level, print what came of it, and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", nargs="?", default="first", choices=["first", "fresh", "third", "labs"])
    parser.add_argument("--device", type=devices.argument, default="cpu")
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--rules", default="", help="the commit of the rules, for the ledger")
    parser.add_argument("--corpus", type=pathlib.Path, default=HERE / "runs")
    options = parser.parse_args()
    runs = tomllib.loads((options.corpus / f"{options.half}.toml").read_text())["run"]
    folders = {run["name"]: options.corpus / options.half / run["name"] for run in runs}
    for level, names in LEVELS.items():
        judged = [(run, told) for run in runs if (told := judge(folders[run["name"]], names))]
        for run, told in judged:
            metrics = {"half": options.half, "level": level, "expected": ", ".join(run["expected"]) or "none",
                       "odd": bool(run["odd"]), "variant": run["variant"], "stack": run["stack"],
                       "said": ", ".join(told["causes"]) or "none", "named": ", ".join(told["named"]) or "none",
                       "rules": options.rules,
                       **{f"is_{key}": value for key, value in grade(run, told).items()}}  # fmt: skip
            observe.record("ground", "measured", metrics, case=f"diagnose: {level}: {run['name']}", seed=run["seed"])
        report(f"{options.half}, {level}", [(run, grade(run, told)) for run, told in judged])
        if level.startswith(("scalars, script", "all")):
            confusion(judged)
    for name, found in (baselines(list(folders.values())) if options.baselines else {}).items():
        graded = []
        for run in runs:
            if run["name"] not in found:
                continue
            ids = found[run["name"]]
            meant = [MEANS.get(each, set()) for each in ids]
            expected = set(run["expected"])
            result = {"false_alarm": bool(ids), "right": not ids} if not expected else {
                "right": bool(meant[:1] and meant[0] & expected),
                "in_three": any(causes & expected for causes in meant[:3]), "missed": not ids,
            }  # fmt: skip
            graded.append((run, result))
            metrics = {"half": options.half, "level": "scalars", "said": ", ".join(ids) or "none", "tool": name,
                       "expected": ", ".join(run["expected"]) or "none",
                       **{f"is_{key}": value for key, value in result.items()}}  # fmt: skip
            observe.record("ground", "measured", metrics, case=f"baseline: {name}: {run['name']}", seed=run["seed"])
        report(f"{options.half}, {name}", graded)


def report(title: str, graded: list[tuple[dict, dict[str, bool]]]) -> None:
    """Print the shares of a level, each with its interval."""
    faulty = [result for run, result in graded if run["expected"]]
    healthy = [result for run, result in graded if not run["expected"]]
    print(f"\n{title}: {len(faulty)} faulty runs, {len(healthy)} healthy ones")
    for group, keys in ((faulty, ("right", "named", "in_three", "abstained", "right_probe", "missed", "wrong_name")),
                        (healthy, ("right", "abstained", "false_alarm"))):  # fmt: skip
        for key in keys:
            count = sum(result.get(key, False) for result in group)
            low, high = wilson(count, len(group))
            kind = "faulty" if group is faulty else "healthy"
            print(f"  {kind:8}{key:12} {count:3} of {len(group):3}   {low:.0%} to {high:.0%}")


def confusion(judged: list[tuple[dict, dict]]) -> None:
    """Print what was said first, by what was expected."""
    cells: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for run, told in judged:
        said = told["causes"][0] if told["causes"] else "healthy" if told["healthy"] else "nothing"
        cells[",".join(run["expected"]) or "healthy"][said + ("?" if told["abstained"] else "")] += 1
    for expected, row in sorted(cells.items()):
        print(f"  {expected:14} {', '.join(f'{said} {count}' for said, count in row.most_common())}")


if __name__ == "__main__":
    main()
