"""How long the course takes as a whole: set-up, notebooks, the labs' proof, the tests. `make times`, for about an hour.

    python benchmarks/times.py [--only first,set-up,again,course,proof,tests] [--rounds 3] [--out evidence/cpu.json]
    python benchmarks/times.py --junit FILE    # the minutes of a `make test` that has run and wrote FILE
    python benchmarks/times.py --budget        # which notebooks and labs were over their seconds; exit status 1 if any

Each is called as a reader calls it, in a fresh clone with empty caches; of several rounds the median is kept. Packages
come from where pip and uv find them here. Every part's record holds the share of the processors that went to other
work: where it is large, the minutes tell more of that than of the course. Part of no `evidence record`, for it measures
that too.
"""

import argparse
import collections
import contextlib
import ctypes
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

from failurelab_course import eras
from failurelab_course.experiments import observe
from failurelab_course.ledger.records import key, read_ledger, write_ledger
from failurelab_course.ledger.tables.times import SOURCE

CALLS = {
    "first": ["make", "lab", "LAB=true"],  # until JupyterLab would open
    "set-up": ["make", "setup"],
    "again": ["make", "setup"],
    "course": [".venv/bin/failurelab", "run"],
    "proof": [".venv/bin/failurelab", "verify", "--junit", ".course/labs.xml"],
    "fast tests": ["make", "test-fast"],
    "tests": ["make", "test"],
}
FROM_NOTHING = ("first", "set-up")
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
# Seconds on an idle core that one may take. A lab's are those of all its scripts.
BUDGETS = {"notebooks": 40, "labs": 20}


def timed(command: list[str], clone: pathlib.Path, caches: pathlib.Path) -> dict:
    """Run a command of the course; return its minutes, those that its processes computed, and what others took.

    Raises:
        SystemExit: it failed: times of a failure are no figures.
    """
    fresh = {"XDG_CACHE_HOME": str(caches), "UV_CACHE_DIR": str(caches / "uv"), "PIP_CACHE_DIR": str(caches / "pip")}
    fresh["PYTEST_ADDOPTS"] = "--junit-xml=.course/tests.xml"
    used, (worked, could) = resource.getrusage(resource.RUSAGE_CHILDREN), observe.machine_seconds()
    start = time.perf_counter()
    done = subprocess.run(command, cwd=clone, env=os.environ | fresh, capture_output=True, text=True)
    seconds, (after, could_after) = time.perf_counter() - start, observe.machine_seconds()
    with contextlib.suppress(ChildProcessError):  # servers whose parent ended before them
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}: no time is recorded")
    own = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    share = max(after - worked - own, 0.0) / (could_after - could)
    return {"minutes": seconds / 60, "processor_minutes": own / 60, "others_share": share, "cores": os.cpu_count()}


def notebooks(clone: pathlib.Path) -> dict:
    """Return the names, seconds and largest processes (MiB) of the notebooks that ran last."""
    ran = json.loads((clone / ".course" / "runs" / "latest" / "results.json").read_text())["results"]
    return {
        "notebooks": [run["name"] for run in ran],
        "seconds": [round(run["seconds"]) for run in ran],
        "peak_mib": [round(run["peak_bytes"] / 2**20) for run in ran],
    }


def labs(clone: pathlib.Path) -> dict:
    """Return the names of the labs that were proved last, and the seconds of all scripts of each."""
    seconds = collections.Counter()
    for case in xml.etree.ElementTree.parse(clone / ".course" / "labs.xml").iter("testcase"):
        seconds[case.get("classname")] += float(case.get("time") or 0)
    return {"labs": list(seconds), "seconds": [round(value) for value in seconds.values()]}


def tests(clone: pathlib.Path) -> dict:
    """Return how many tests ran, and the files that took longest with their seconds."""
    return {name: value for name, value in of_junit(clone / ".course" / "tests.xml").items() if name != "minutes"}


def stacks(clone: pathlib.Path) -> dict:
    """Return how many library stacks a set-up makes."""
    return {"eras": len(list((clone / "eras").glob("*.in")))}


MORE = {"set-up": stacks, "course": notebooks, "proof": labs, "fast tests": tests, "tests": tests}


def over_budget(ledger: pathlib.Path) -> list[str]:
    """Return a line for each notebook and lab that took longer than its budget when it was measured last."""
    lines = []
    for record in (record for record in read_ledger(ledger) if record["source"] == SOURCE):
        for kind, budget in BUDGETS.items():
            for name, seconds in zip(record["figures"].get(kind, []), record["figures"].get("seconds", [])):
                if seconds > budget:
                    lines.append(f"{name}: {seconds} s, its budget is {budget} s")
    return lines


def of_junit(path: pathlib.Path) -> dict:
    """Return the minutes and the counts that a run of the tests wrote of itself, and its longest files.

    Raises:
        SystemExit: no such file, or tests failed: times of a failure are no figures.
    """
    try:
        suite = xml.etree.ElementTree.parse(path).getroot().find("testsuite")
        counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        minutes = float(suite.get("time")) / 60
    except (OSError, xml.etree.ElementTree.ParseError, AttributeError, TypeError) as error:
        raise SystemExit(f"{path} is no JUnit XML of pytest: {error}. Next: PYTEST_ADDOPTS=--junit-xml=FILE") from None
    if counts["failures"] or counts["errors"]:
        raise SystemExit(f"{path}: {counts['failures']} failures, {counts['errors']} errors: no time is recorded")
    files = collections.Counter()
    for case in suite.iter("testcase"):
        files[(case.get("classname") or "").rpartition(".")[2]] += float(case.get("time") or 0)
    longest = files.most_common(12)
    counted = {"minutes": minutes, "tests": counts["tests"], "skipped": counts["skipped"], "cores": os.cpu_count()}
    return counted | {"files": [name for name, _ in longest], "file_seconds": [round(value) for _, value in longest]}


def keep(part: str, metrics: dict, out: pathlib.Path) -> None:
    """Put the metrics of a part into the ledger, beside those of other parts, and print them."""
    new = observe.record("ground", "measured", metrics, case=f"how long: {part}")
    old = read_ledger(out) if out.exists() else []
    write_ledger(out, [*(record for record in old if key(record) != key(new)), new])
    print(part, json.dumps(metrics), flush=True)


def main() -> None:
    """Measure the parts that are asked for, and keep each when it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CALLS), help="parts, in the order in which they are to run")
    parser.add_argument("--out", type=pathlib.Path, default=eras.root() / "evidence" / "cpu.json")
    parser.add_argument("--rounds", type=int, default=1, help="how often each part is measured")
    parser.add_argument("--budget", action="store_true", help="say which notebooks and labs took too long; run nothing")
    parser.add_argument("--junit", type=pathlib.Path, help="take the tests' minutes from this file, and run nothing")
    asked = parser.parse_args()
    os.environ["FAILURELAB_SOURCE"] = SOURCE
    if sys.platform == "linux":  # what a server computed is counted too, for it becomes our child when its parent ends
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if asked.budget:
        lines = over_budget(asked.out)
        print("\n".join(lines or ["every notebook and lab that was measured is within its budget"]))
        raise SystemExit(bool(lines))
    if asked.junit:
        return keep("tests", of_junit(asked.junit), asked.out)
    parts = asked.only.split(",")
    if unknown := set(parts) - set(CALLS):
        parser.error(f"no part {', '.join(sorted(unknown))}: the parts are {', '.join(CALLS)}")
    with tempfile.TemporaryDirectory(prefix="times-", ignore_cleanup_errors=True) as top:
        ready = None
        for part in parts:
            if not ready and part not in FROM_NOTHING:
                ready = fresh_clone(pathlib.Path(top, "ready"))
                timed(CALLS["set-up"], *ready)  # what the parts need, and no figure
            rounds = []
            for number in range(asked.rounds):
                place = fresh_clone(pathlib.Path(top, f"{part}-{number}")) if part in FROM_NOTHING else ready
                rounds.append(timed(CALLS[part], *place) | (MORE[part](place[0]) if part in MORE else {}))
                ready = place if part == "set-up" else ready
            rounds.sort(key=lambda metrics: metrics["minutes"])
            median = rounds[len(rounds) // 2]
            keep(part, median | {"rounds": [metrics["minutes"] for metrics in rounds]}, asked.out)


def fresh_clone(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Make a clone of the course with empty caches; return both folders."""
    subprocess.run(["git", "clone", "-q", str(eras.root()), str(folder / "clone")], check=True)
    return folder / "clone", folder / "caches"


if __name__ == "__main__":
    main()
