"""Whether a test fails now and then: one round of the suite on this code, recorded beside the rounds before.

    python tools/flakes.py [tests/unit/test_logits.py ...]

`make flakes` runs one round; ten on one code are wanted, and beside other work. A round that is interrupted leaves
nothing, and the next call begins it again. A round of the whole suite is a line of evidence/cpu/flakes.jsonl, with the
commit, seconds, number of tests, those that failed, and the machine's load; a commit that changes
evidence/ and docs/ alone is the same code. The exit status is 0 if no test failed in any round of this code, 1 if one
did, 2 if the tree has changes, so that the rounds would not be of one code.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time

import junitparser

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".course" / "flakes"
RECORD = ROOT / "evidence" / "cpu" / "flakes.jsonl"
ROUNDS = 10
PYTEST = ("-m", "pytest", "-q", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")


def git(*words: str) -> str:
    """Return what git says of the tree."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def code() -> str:
    """Return a digest of what the commit holds beside evidence/ and docs/."""
    tree = [line for line in git("ls-tree", "HEAD").splitlines() if not line.endswith(("\tevidence", "\tdocs"))]
    return hashlib.sha256("\n".join(tree).encode()).hexdigest()[:8]


def round_of(tests: list[str]) -> dict:
    """Run the tests once; return what is recorded of it.

    Raises:
        RuntimeError: pytest could not run them.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    report, start = FOLDER / "last.xml", time.monotonic()
    report.unlink(missing_ok=True)
    status = subprocess.run([sys.executable, *PYTEST, f"--junitxml={report}", *tests], cwd=ROOT).returncode
    if status not in (0, 1) or not report.is_file():
        raise RuntimeError(f"pytest ended with status {status}. Next: make test")
    cases = [case for suite in junitparser.JUnitXml.fromfile(str(report)) for case in suite]
    bad = [
        case for case in cases if any(isinstance(one, junitparser.Failure | junitparser.Error) for one in case.result)
    ]
    return {
        "code": code(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "of": tests or ["all"],
        "tests": len(cases),
        "failed": sorted({f"{case.classname}::{case.name}" for case in bad}),
        "seconds": round(time.monotonic() - start),
        "load": round(os.getloadavg()[2], 1),  # of its last quarter of an hour
    }


def main(tests: list[str]) -> int:
    """Run a round, record it, and tell all rounds of this code."""
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!evidence", ":!docs"):
        print("ERROR the tree has changes, and rounds are counted by commit. Next: git commit", file=sys.stderr)
        return 2
    try:
        done = round_of(tests)
    except RuntimeError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 2
    record = FOLDER / "some.jsonl" if tests else RECORD
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a") as file:
        file.write(json.dumps(done) + "\n")
    rounds = map(json.loads, record.read_text().splitlines())
    rounds = [one for one in rounds if (one["code"], one["of"]) == (done["code"], done["of"])]
    failed = sorted({name for one in rounds for name in one["failed"]})
    print(
        f"{len(rounds)} of {ROUNDS} rounds of {done['commit']}, {done['tests']} tests each: {len(failed)} failed at "
        "least once"
    )
    for name in failed:
        print(f"    {sum(name in one['failed'] for one in rounds)} of {len(rounds)}  {name}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
