"""Where the minutes of the course and of the proof go, from runs on this machine: `make times`.

    python tools/times.py [--parts course verify]

`course` runs each notebook alone, `verify` each lab's scripts. A notebook over 30 seconds, or a lab with a script over
20, is an error: the exit status is 1. A machine that computes something else is said in the first line, for then the
seconds say little. (The suite's: pytest --durations=20.)
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOK, LAB = 30, 20  # seconds, alone on an idle core
IDLE = 0.5  # load over the last minute
SLOWEST = 12


def course(folder: str) -> dict[str, float]:
    """Run the notebooks one after the other; return the seconds of each.

    Raises:
        subprocess.CalledProcessError: one does not pass.
    """
    words = ["-m", "failurelab", "run", "--jobs", "1", "--out", folder]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    results = json.loads(pathlib.Path(folder, "results.json").read_text())["results"]
    return {result["name"]: result["seconds"] for result in results}


def verify(folder: str) -> dict[str, float]:
    """Prove the labs; return the seconds of each one's longest script.

    Raises:
        subprocess.CalledProcessError: a script does not do what is declared.
    """
    words = ["-m", "failurelab", "verify", "--json"]
    done = subprocess.run([sys.executable, *words], cwd=folder, check=True, stdout=subprocess.PIPE)
    longest: dict[str, float] = {}
    for row in json.loads(done.stdout)["rows"]:
        longest[row["lab"]] = max(longest.get(row["lab"], 0.0), row["seconds"])
    return longest


def show(title: str, seconds: dict[str, float], limit: float) -> int:
    """Print the slowest first, with the sum; return how many are over the limit."""
    print(f"\n{title}: {sum(seconds.values()):.0f} s in all")
    over = 0
    for name, value in sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST]:
        late = value > limit
        over += late
        print(f"{value:7.1f}  {name}{f'  OVER {limit} s' if late else ''}")
    return over


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=("course", "verify"), default=("course", "verify"))
    parts, load = parser.parse_args().parts, os.getloadavg()[0]
    print("idle" if load < IDLE else f"NOT IDLE: load {load:.1f}, so these seconds say little", flush=True)
    over = 0
    with tempfile.TemporaryDirectory(prefix="times-") as folder:
        try:
            if "course" in parts:
                over += show("notebooks, each alone", course(folder), NOTEBOOK)
            if "verify" in parts:
                over += show("labs, longest script", verify(folder), LAB)
        except subprocess.CalledProcessError as error:
            print(f"ERROR {' '.join(error.cmd[1:4])} failed. Next: run it by itself", file=sys.stderr)
            return 1
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
