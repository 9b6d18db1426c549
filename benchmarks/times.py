"""How long the course takes as a whole: set-up, notebooks, the labs' proof, the tests. `make times`, for about an hour.

    python benchmarks/times.py [--only set-up,again,course,proof,tests] [--out evidence/cpu.json]
    python benchmarks/times.py --junit FILE    # the minutes of a `make test` that has run and wrote FILE

Each is called as a reader calls it, in a fresh clone with empty caches. Packages come from where
pip and uv find them here. Every part's record holds the share of the processors that went to other work: where it
is large, the minutes tell more of that than of the course. Part of no `evidence record`, for it measures that too.
"""

import argparse
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
    "set-up": ["make", "setup"],
    "again": ["make", "setup"],
    "course": [".venv/bin/failurelab", "run"],
    "proof": [".venv/bin/failurelab", "verify"],
    "tests": ["make", "test"],
}


def timed(command: list[str], clone: pathlib.Path, caches: pathlib.Path) -> dict:
    """Run a command of the course; return its minutes, those that its processes computed, and what others took.

    Raises:
        SystemExit: it failed: times of a failure are no figures.
    """
    fresh = {"XDG_CACHE_HOME": str(caches), "UV_CACHE_DIR": str(caches / "uv"), "PIP_CACHE_DIR": str(caches / "pip")}
    used, (worked, could) = resource.getrusage(resource.RUSAGE_CHILDREN), observe.machine_seconds()
    start = time.perf_counter()
    done = subprocess.run(command, cwd=clone, env=os.environ | fresh, capture_output=True, text=True)
    seconds, (after, could_after) = time.perf_counter() - start, observe.machine_seconds()
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


def of_junit(path: pathlib.Path) -> dict:
    """Return the minutes and the counts that a run of the tests wrote of itself.

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
    return {"minutes": minutes, "tests": counts["tests"], "skipped": counts["skipped"], "cores": os.cpu_count()}


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
    parser.add_argument("--junit", type=pathlib.Path, help="take the tests' minutes from this file, and run nothing")
    asked = parser.parse_args()
    os.environ["FAILURELAB_SOURCE"] = SOURCE
    if asked.junit:
        return keep("tests", of_junit(asked.junit), asked.out)
    parts = asked.only.split(",")
    if unknown := set(parts) - set(CALLS):
        parser.error(f"no part {', '.join(sorted(unknown))}: the parts are {', '.join(CALLS)}")
    with tempfile.TemporaryDirectory(prefix="times-", ignore_cleanup_errors=True) as top:
        clone, caches = pathlib.Path(top, "clone"), pathlib.Path(top, "caches")
        subprocess.run(["git", "clone", "-q", str(eras.root()), str(clone)], check=True)
        if parts[0] != "set-up":
            timed(CALLS["set-up"], clone, caches)  # what the parts need, and no figure
        for part in parts:
            metrics = timed(CALLS[part], clone, caches) | (notebooks(clone) if part == "course" else {})
            keep(part, metrics, asked.out)


if __name__ == "__main__":
    main()
