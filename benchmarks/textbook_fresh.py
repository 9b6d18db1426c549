#!/usr/bin/env python3
"""One step beside the textbook, graded: twenty mistakes and ten healthy trainers by somebody who knew no rule.

    python benchmarks/textbook_fresh.py [--names NAME ...]

`corpus/trainers.tar.xz` has them: written after the rules of commit 682e297, and graded once, as they are. A record for
each: the verdict of every step that its author names, and what is named. Whether a name is the author's mistake is
decided by hand, in the table `SAME`, after the grading.

Eras: today.
"""

import contextlib
import importlib.util
import io
import pathlib
import sys
import tempfile

import archives
import recording

from failurelab import textbook
from failurelab_course import eras
from failurelab_course.experiments import observe

CASES = pathlib.Path(__file__).with_name("corpus") / "trainers.tar.xz"
# What may be named, by the author's own words; whatever else is named of a case is named wrongly.
SAME = {
    "logps_without_temperature": "temperature",
    "scoring_attends_to_padding": "no attention mask",
    "padding_in_the_loss": "padding is trained on",
    "entropy_quantile_not_complemented": "top_entropy_quantile",
    "leave_one_out_baseline": "constant factor",
    "deviation_smoothed_over_steps": "constant factor",
    "sorted_without_the_advantages": "other rows' advantages",
    "reward_cache_without_the_prompt": "other rows' advantages",
    "dapo_normalized_per_micro_batch": "loss_type",
    "last_window_of_the_epoch": "accumulation",
    "clip_without_the_minimum": "clipping",
}


def judge(case: dict) -> dict:
    """Return the figures of one case, in a trainer of its own."""
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = case["make"](*case["load"](), folder)
        with textbook.compare(trainer, case["steps"]) as comparison:
            trainer.train()
    reports = comparison.reports
    named = next((report.named for report in reports if report.named), None)
    found = any(report.verdict == "FOUND" for report in reports)
    verdict = "found" if found else "held"
    if named:
        verdict = "named" if named == SAME.get(case["name"]) else "named wrongly"
    worst = min((report.apart for report in reports if report.apart), key=lambda apart: apart.cosine, default=None)
    return {
        "verdict": verdict,
        "verdicts": [report.verdict for report in reports],
        "named": named,
        "what": case["what"],
        "cosine": worst.cosine if worst else None,
        "size": worst.size if worst else None,
    }


def main() -> None:
    """Grade and record."""
    options = recording.begin(__doc__, names={"nargs": "*", "help": "names of cases; all without"})
    sys.path.insert(0, str(eras.root() / "tests" / "unit"))  # `steps`, which the cases make their trainers with
    with tempfile.TemporaryDirectory(prefix="cases-") as folder, contextlib.chdir(eras.root()):
        spec = importlib.util.spec_from_file_location(
            "cases", archives.unpack(CASES, pathlib.Path(folder)) / "cases.py"
        )
        cases = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cases)
    for part, group in (("mistake", cases.BUGS), ("healthy", cases.HEALTHY)):
        for case in group:
            if options.names and case["name"] not in options.names:
                continue
            figures = judge(case | {"load": cases.load})
            print(f"{part} {case['name']}: {figures['verdict']} {figures['named'] or ''}", flush=True)
            observe.record("F21", "measured", figures, case=f"{part}: {case['name']}", device=options.device)


if __name__ == "__main__":
    main()
