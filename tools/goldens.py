"""What preflight and the guards answer, beside what they answered when it was last written down: `make goldens`.

    python tools/goldens.py [PART ...] [--only TEXT] [--once] [--write]

A part is a half of preflight's corpus (`benchmarks/corpus`), or `guards`: what each guard says in its own tests. The
answers stand in tests/goldens/PART.json: for each script what is named, suspected, held and not checked, for each test
the guards' notices with their failures; no sentences. Whatever changed is printed, and the exit status is 1. A change
that is wanted is written with `--write`, and its commit says whether it is better, worse and why it is worth it, or the
same in other words. With `--once` repairs are not tried, so what would be named is suspected: the two count as one.

Whole, with repairs tried, this takes two hours of one core; `--only` takes scripts, or tests, whose name holds a text.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "goldens"
GUARDS = "guards"
TESTS = ("guards", "logits_guard", "mismatch", "reward_guard", "step_guard", "updates", "guard_script")
KINDS = ("named", "suspected", "held", "not_checked")
PLUGIN = "tests.unit.said_by_guards"

Answers = dict[str, Any]


def read_part(part: str) -> Answers:
    """Return the answers that were written down for a part; none where it has no file yet."""
    path = FOLDER / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_part(part: str, answers: Answers) -> None:
    """Write the answers of a part, a line for each script or test."""
    FOLDER.mkdir(exist_ok=True)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(answers[name])}" for name in sorted(answers))
    (FOLDER / f"{part}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def ask_preflight(part: str, only: str, once: bool) -> Answers:
    """Run preflight on the scripts of a half of the corpus."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import preflight_corpus

    answers = {}
    for case in preflight_corpus.read_corpus():
        needs_clone = case.script.startswith("examples:") and preflight_corpus.REPOSITORY not in os.environ
        if case.half != part or only not in case.name or needs_clone:
            continue
        result = preflight_corpus.judge(case, tries=False if once else None)
        answers[case.name] = {kind: sorted(result[kind]) for kind in KINDS} | {"judged": not result["error"]}
        print(f"{case.name}: {_in_words(answers[case.name])}", flush=True)
    return answers


def ask_guards(only: str) -> Answers:
    """Run the guards' tests; return what each guard said in each.

    Raises:
        RuntimeError: a test failed, so that its guards may not have been asked.
    """
    with tempfile.TemporaryDirectory(prefix="goldens-") as folder:
        record = pathlib.Path(folder) / "notices.json"
        files = [f"tests/unit/test_{name}.py" for name in TESTS]
        words = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, *files, *(["-k", only] if only else [])]
        environment = os.environ | {"SAID_BY_GUARDS": str(record), "OMP_NUM_THREADS": "1"}
        if subprocess.run(words, cwd=ROOT, env=environment).returncode:
            raise RuntimeError("a test of the guards failed. Next: make it pass, and compare then")
        return json.loads(record.read_text(encoding="utf-8"))


def compare(before: Answers, now: Answers, once: bool = False) -> list[str]:
    """Return a line for each script or test whose answer is another one, or that has none yet."""
    lines = []
    for name, answer in sorted(now.items()):
        old = before.get(name)
        if old is None:
            lines.append(f"{name}: new, {_in_words(answer)}")
        elif _accused_as_one(old, once) != _accused_as_one(answer, once):
            lines.append(f"{name}: was {_in_words(old)}; is {_in_words(answer)}")
    return lines


def _accused_as_one(answer: Answers, once: bool) -> Answers:
    """Return an answer in which, if nothing was tried, what is named and what is suspected are not told apart."""
    if not once or "named" not in answer:
        return answer
    accused = {"accused": sorted(answer["named"] + answer["suspected"])}
    return accused | {kind: answer[kind] for kind in ("held", "not_checked", "judged")}


def _in_words(answer: Answers) -> str:
    if "named" not in answer:
        return "; ".join(f"{notice} x{count}" for notice, count in answer.items())
    told = [f"{kind.replace('_', ' ')} {', '.join(answer[kind]) or '-'}" for kind in KINDS]
    return "; ".join([*told, *(["not judged"] if not answer["judged"] else [])])


def main() -> int:
    """Compare the parts that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = sorted(path.stem for path in FOLDER.glob("*.json"))
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(known)}; all without")
    parser.add_argument("--only", default="", help="scripts or tests whose name holds this text")
    parser.add_argument("--once", action="store_true", help="try no repairs")
    parser.add_argument("--write", action="store_true", help="write today's answers down")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(known):
        parser.error(f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    if options.once and options.write:
        parser.error("--once names nothing, so it is not written down")
    changed = 0
    for part in options.parts or known:
        now = ask_guards(options.only) if part == GUARDS else ask_preflight(part, options.only, options.once)
        before = read_part(part)
        gone = [] if options.only else sorted(set(before) - set(now))
        lines = compare(before, now, options.once) + [f"{name}: is no longer asked" for name in gone]
        print(f"{part}: {len(now)} asked, {len(lines)} changed", *(f"  {line}" for line in lines), sep="\n")
        changed += len(lines)
        if options.write:
            write_part(part, ({} if not options.only else before) | now)
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
