#!/usr/bin/env python3
"""How far the labs' thresholds are from both sides: broken script and solution, with ten seeds.

    python benchmarks/lab_thresholds.py [--labs 01 03] [--seeds 10]

Each script is run with its own seed and with the next ones. For each threshold of the healthy run, a number that a
figure must be above or below, a record has what both scripts measured, and how far the solution's worst one is from
the threshold, in spreads (largest minus smallest) of the solution's figures. Labs whose script draws nothing have no
seed and are left out. The exit status is 1 if a solution does not pass, or a broken script does.

Eras: today.
"""

import pathlib
import re
import tempfile

import frames
import recording

from failurelab_course.experiments import observe
from failurelab_course.labs import definition, verify

SEED = re.compile(r"\b(seed=|manual_seed\()0\b")
ABOVE, BELOW = (">", ">="), ("<", "<=")


def write(script: definition.Script, folder: pathlib.Path, seeds: int) -> list[pathlib.Path]:
    """Write a script with each seed; return the files."""
    paths = [folder / f"{script.name}_{seed}.py" for seed in range(seeds)]
    for seed, path in enumerate(paths):
        path.write_text(SEED.sub(rf"\g<1>{seed}", script.text()), encoding="utf-8")
    return paths


def thresholds(lab: definition.Lab, scripts: dict[str, list[verify.ScriptOutcome]]) -> list[dict]:
    """Return for each threshold of a lab its number, both scripts' figures and the distance in spreads."""
    lines = []
    for predicate in lab.healthy:
        if predicate.op not in ABOVE + BELOW or isinstance(predicate.value, bool):
            continue
        if not isinstance(predicate.value, int | float):
            continue
        sides = {side: [row.metrics.get(predicate.figure) for row in rows] for side, rows in scripts.items()}
        sides = {side: [value for value in values if value is not None] for side, values in sides.items()}
        values = sides["solution"] or [0.0]
        spread = max(values) - min(values)
        if not spread:  # counts, and settings: nothing that chance moves
            continue
        worst = min(values) - predicate.value if predicate.op in ABOVE else predicate.value - max(values)
        lines.append({"check": str(predicate), **sides, "spreads_to_solution": round(worst / spread, 2)})
    return lines


def table_lab_thresholds(folder: pathlib.Path) -> str:
    """The thresholds nearest to what a solution measures, beside broken scripts; and how many are farther."""
    runs = frames.read_runs(folder, "lab_thresholds", r"threshold of lab (?P<lab>\d+): .*").sort_values("case")
    near = runs["spreads_to_solution"] < 1.5

    def side(name: str) -> tuple:
        return name, lambda run: f"{min(run[name]):.3g} to {max(run[name]):.3g}" if run[name] else "-"

    rows = frames.table(
        ["lab"],
        frames.list_runs(runs[near], "lab"),
        ("threshold", lambda run: f"`{run['check']}`"),
        side("broken"),
        side("solution"),
        ("spreads between", "spreads_to_solution", ".1f"),
    )
    passed, tried = runs["solutions_that_pass"].sum(), runs["seeds"].sum()
    return f"{rows}\n\n{(~near).sum()} more are farther. Of all figures of solutions {passed} of {tried} pass."


def main() -> None:
    """Run them and record."""
    options = recording.begin(__doc__, labs={"nargs": "*", "help": "numbers of labs; all without"}, seeds=10)
    for lab in definition.find(options.labs):
        if lab.false_alarm or not SEED.search(lab.start.read_text(encoding="utf-8")):
            continue
        with tempfile.TemporaryDirectory(prefix="thresholds-") as name:
            folder = pathlib.Path(name)
            files = [*write(lab.broken, folder, options.seeds), *write(lab.solution, folder, options.seeds)]
            rows = verify.check_all(lab, files, device=options.device)
        broken, healed = rows[: options.seeds], rows[options.seeds :]
        passed = {
            "broken_that_pass": sum(row.result == verify.PASS for row in broken),
            "solutions_that_pass": sum(row.result == verify.PASS for row in healed),
            "seeds": options.seeds,
        }
        for row in healed:
            if row.result != verify.PASS:
                print(f"lab {lab.number} {row.script}: {row.result}. {row.reason}", flush=True)
        print(f"lab {lab.number}: {passed}", flush=True)
        failure = next(iter(lab.failures), "ground")
        for line in thresholds(lab, {"broken": broken, "solution": healed}):
            print(f"    {line}", flush=True)
            case = f"threshold of lab {lab.number}: {line['check']}"
            observe.record(failure, "measured", passed | line, case=case, device=options.device)


if __name__ == "__main__":
    main()
