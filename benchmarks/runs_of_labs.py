#!/usr/bin/env python3
"""Runs of the labs' scripts, whose causes are known: what `failurelab diagnose` says of what each leaves.

    python benchmarks/runs_of_labs.py [--labs 01 02]
    python benchmarks/diagnose_grading.py labs --corpus .course/runs_of_labs

The labs were written for learners, and no rule of diagnose was written on a run of theirs. Of each lab that trains by
GRPOTrainer in one process: the script as a learner finds it and what people try in vain, each with the lab's failures
as expected causes; its solution, and two of the other cures of `lab_cures.toml`, which are healthy. They are run by
`benchmarks/runs/worker.py` as users run a script, not by the labs' checker, and then preflight is asked about each.
What they leave stays in `.course/runs_of_labs`; the ledger holds what was said of them.

Eras: today.
"""

import argparse
import concurrent.futures
import json

import lab_cures
import runs_corpus

from failurelab_course import eras
from failurelab_course.experiments import devices
from failurelab_course.labs import definition

FOLDER = eras.root() / ".course" / "runs_of_labs"
HALF = "labs"
CURES = 2
# Which of a lab's failures no curve shows: it costs memory alone.
NO_CURVE = {"F3a"}
# A completion is compared with a number: no reward is above another (F10), for none can be right (F14).
TWO_NAMES = {"35": ["F14", "F10"]}
# What heals at a price that the lab rules out, or without the words that it asks for: its run is healthy.
HEALED = {"checkpointing_off", "repaired_and_not_explained"}
# What breaks something else, or of which the lab itself says no more than that it is another training.
OTHER = {"15 merged_first", "22 larger_learning_rate", "33 the_policy_itself", "35 break_the_tie"}
HERE = 'pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"'


def read_runs(numbers: list[str]) -> list[dict]:
    """Return the runs: name, script, stack, expected causes, and why a healthy one may look broken."""
    cures, runs = lab_cures.read_cures(), []
    for lab in definition.find(numbers or None):
        if lab.trainer != "GRPOTrainer" or any("deepspeed" in need or "PartialState" in need for need in lab.needs):
            continue
        expected = [failure for failure in TWO_NAMES.get(lab.number, lab.failures) if failure not in NO_CURVE]
        healthy = [lab.solution, *cures.get(lab.number, [])[:CURES]]
        if lab.false_alarm:  # nothing is wrong with it, and what people try is another training
            scripts = [(lab.broken, []), *((script, []) for script in healthy)]
        elif expected:
            tried = [(fix, [] if fix.name in HEALED else expected) for fix in lab.wrong_fixes]
            scripts = [(lab.broken, expected), *tried, *((script, []) for script in healthy)]
        else:
            continue
        for script, causes in scripts:
            variant = f"{lab.number} {script.name}"
            if variant in OTHER:
                continue
            text = script.text().replace(HERE, 'pathlib.Path("models/tiny-qwen2")')
            runs.append({"name": runs_corpus.name_of(variant, 0), "variant": variant, "stack": lab.era, "seed": 0,
                         "expected": causes, "odd": not causes, "script": text})  # fmt: skip
    return runs


def make(runs: list[dict]) -> None:
    """Run what was not run yet, two processes at a time."""
    jobs = []
    for run in runs:
        folder = FOLDER / HALF / run["name"]
        if (folder / "train.py").exists() and (folder / "train.py").read_text() == run["script"]:
            continue
        jobs.append((run["stack"], {
            "name": run["name"], "label": run["variant"], "script": run["script"], "artefacts": str(folder),
            "kept": str(FOLDER / "kept" / run["name"]), "models": str(eras.root() / "models"),
        }))  # fmt: skip
    jobs.sort(key=lambda job: job[0])
    parts = [jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]]

    def work(part: list) -> None:
        for stack in dict.fromkeys(stack for stack, _ in part):
            runs_corpus.work(stack, [job for name, job in part if name == stack])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, parts))


def main() -> None:
    """Run the scripts, ask preflight about each, and list the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=devices.argument, default="cpu", help="not used: the runs are on the CPU")
    parser.add_argument("--labs", nargs="*", default=[], help="numbers of labs; all without")
    options = parser.parse_args()
    runs = read_runs(options.labs)
    make(runs)
    lines = []
    for run in runs:
        if (FOLDER / HALF / run["name"] / "versions.txt").exists():
            listed = {key: run[key] for key in ("name", "variant", "stack", "seed", "expected", "odd")}
            lines += ["[[run]]", *(f"{key} = {json.dumps(value)}" for key, value in listed.items()), ""]
        else:
            print(f"{run['variant']} left nothing")
    (FOLDER / f"{HALF}.toml").write_text("\n".join(lines))
    names = [run["variant"] for run in runs]
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(
            pool.map(lambda part: runs_corpus.ask_preflight(HALF, part, False, FOLDER, eras.root() / "models"), halves)
        )


if __name__ == "__main__":
    main()
