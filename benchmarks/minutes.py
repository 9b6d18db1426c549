#!/usr/bin/env python3
"""How long the course, the labs' proof and the tests take, as whole commands on this machine, which should be idle.

    python benchmarks/minutes.py [--rounds 3] [--parts course verify fast suite]

Wall-clock seconds of `failurelab run`, `failurelab verify`, and what `make test-fast` and `make test` run once all is
set up. A command that fails ends it.

Eras: today.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import frames
import recording

from failurelab_course import eras
from failurelab_course.experiments import observe

PYTEST = ("pytest", "-q", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")
COMMANDS = {
    "course": ("failurelab", "run", "--out", "{folder}"),
    "verify": ("failurelab", "verify"),
    "fast": (*PYTEST, "-m", "not slow and not nightly"),
    "suite": PYTEST,
}


def table_minutes(folder: pathlib.Path) -> str:
    """How long each whole command takes on an idle machine: the median, and the range."""
    names = {
        "course": "`failurelab run`: all notebooks",
        "verify": "`failurelab verify`: all labs in three states",
        "fast": "`make test-fast`, once set up",
        "suite": "`make test`, once set up",
    }
    runs = frames.read_runs(folder, "minutes").to_dict("records")
    return "\n".join(
        f"- {names[run['case']]}: {frames.spread([each / 60 for each in run['seconds_of_each']], '.1f')} minutes"
        for run in runs
    )


def main() -> None:
    """Measure and record."""
    options = recording.begin(__doc__, rounds=3, parts={"nargs": "+", "choices": COMMANDS, "default": list(COMMANDS)})
    for part in options.parts:
        seconds, loads = [], []
        for _ in range(options.rounds):
            loads.append(round(os.getloadavg()[0], 1))
            with tempfile.TemporaryDirectory(prefix="minutes-") as folder:
                words = [word.format(folder=pathlib.Path(folder, "out")) for word in COMMANDS[part]]
                started = time.monotonic()
                done = subprocess.run([sys.executable, "-m", *words], cwd=eras.root(), stdout=subprocess.DEVNULL)
                seconds.append(round(time.monotonic() - started))
            if done.returncode:
                sys.exit(f"{part} ended with status {done.returncode}. Next: {' '.join(words)}")
            print(part, seconds[-1], flush=True)
        metrics = {"seconds_of_each": seconds, "load_before": loads, "cores": os.cpu_count()}
        observe.record("ground", "measured", metrics, case=part)


if __name__ == "__main__":
    main()
