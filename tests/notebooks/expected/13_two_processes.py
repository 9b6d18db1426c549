"""Notebook 13: by its own tokens a process takes another step; by those of all, half of it; by their mean, it."""


def check(result):
    alone, broken, by_all, repaired = (
        result.figures(case=f"notebook 13: {name}")
        for name in ("one process", "two processes", "divided by all", "repaired")
    )
    few, many = broken["tokens"]
    assert many > 1.3 * few and broken["cosine"] < 0.998 and abs(broken["size"] - 1) > 0.05, broken
    assert "each rank divides by its own tokens" in broken["reason"], broken
    assert by_all["cosine"] > 0.999 and abs(by_all["size"] - 0.5) < 0.01, by_all
    assert "divided by the number of ranks once too often" in by_all["reason"], by_all
    assert min(broken["halves"]) < 0.998  # the cosine of one changed line of notebook 00's step
    for healthy in (alone, repaired):
        assert healthy["cosine"] > 0.999 and abs(healthy["size"] - 1) < 0.01, healthy


# Wrong answers to the exercise: what a process divides by.

HEAD = "def divisor(counts):\n    return "
WRONG = [
    (HEAD + "sum(counts)", "half the divisor undoes it"),
    (HEAD + "sum(counts) / sum(count > 0 for count in counts)", "is averaged in, too"),
    (HEAD + "sum(counts) // len(counts)", "need not be a whole number"),
    (HEAD + "counts", "Alone, a process divides by its tokens"),
]
RIGHT = ["import statistics\n" + HEAD + "statistics.mean(counts)"]

# The diff: with it a token counts alike in each process, so that the step is GRPO's. In two processes. The step
# after the script's own is held beside its definition.

PROCESSES, ARGUMENTS = 2, ["models/tiny-qwen2", "0"]
BEFORE = """
import sys
from failurelab_course.experiments import models

sys.argv[1] = models.source("tiny")
"""
MEASURE = """
from failurelab import textbook

trainer.args.max_steps = 1
with textbook.compare(trainer, with_suspects=False) as comparison:
    trainer.train()
report = comparison.report
metrics = {"verdict": report.verdict, "cosine": report.apart.cosine}
healed = report.verdict == "HELD"
"""
SHORT = [("max_steps=20", "max_steps=1")]
