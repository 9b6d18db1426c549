#!/usr/bin/env python3
"""Cures of the labs that their authors did not have in mind: does the checker pass each of them?

    python benchmarks/lab_cures.py [--labs 01 06]

`lab_cures.toml` has them as edits of a lab's start script. A record for each lab: the cures by name, and what became of
each. The exit status is 1 if one was refused.

Eras: today.
"""

import pathlib
import sys
import tempfile

import frames
import recording

from failurelab.failures.toml_table import read_toml
from failurelab_course.experiments import observe
from failurelab_course.labs import definition, verify


def read_cures() -> dict[str, list[definition.Script]]:
    """Return the cures of each lab, by its number."""
    path = pathlib.Path(__file__).with_name("lab_cures.toml")
    cures: dict[str, list[definition.Script]] = {}
    for cure in read_toml(path)["cure"]:
        (lab,) = definition.find([cure.pop("lab")])
        cures.setdefault(lab.number, []).append(definition.Script(start=lab.start, **cure))
    return cures


def table_lab_cures(folder: pathlib.Path) -> str:
    """How many cures of each lab that its author did not have in mind the checker passes; their names would tell."""
    runs = frames.read_runs(folder, "lab_cures", r"cures of lab (?P<lab>\d+)").sort_values("lab")
    passing = ("other cures that pass", lambda run: f"{run['results'].count('PASS')} of {len(run['results'])}")
    return frames.table(["lab"], frames.list_runs(runs, "lab"), passing)


def main() -> None:
    """Check them and record."""
    options = recording.begin(__doc__, labs={"nargs": "*", "help": "numbers of labs; all without"})
    refused = 0
    with tempfile.TemporaryDirectory(prefix="cures-") as folder:
        for number, cures in read_cures().items():
            if options.labs and number not in options.labs:
                continue
            (lab,) = definition.find([number])
            rows = verify.check_all(lab, [cure.write(pathlib.Path(folder, number)) for cure in cures])
            for row in rows:
                print(f"lab {number} {row.script.removesuffix('.py')}: {row.result}. {row.reason}", flush=True)
            refused += sum(row.result != verify.PASS for row in rows)
            figures = {
                "cures": [cure.name for cure in cures],
                "results": [str(row.result) for row in rows],
            }
            failure = next(iter(lab.failures), "ground")
            observe.record(failure, "measured", figures, case=f"cures of lab {number}", device=options.device)
    sys.exit(int(refused > 0))


if __name__ == "__main__":
    main()
