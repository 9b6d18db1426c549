"""Notebook 13: rank 1 trains with rank 0's advantages; cut at the right place, two processes learn as one does."""


def check(result):
    broken, repaired = (result.figures(case=f"notebook 13: {name}") for name in ("two processes", "two, repaired"))
    runs = result.figures(case="notebook 13: runs")
    assert broken["copied"] and broken["cosine"] < 0.99  # +0.94 with seed 2
    assert broken["cosines"][0] > 0.999 and abs(broken["cosines"][1]) < 0.95
    assert "advantages mixed between ranks" in runs["reason"]
    assert not repaired["copied"] and min(repaired["cosine"], *repaired["cosines"]) > 0.999
    assert repaired["late"] > broken["late"] + 0.06 and abs(repaired["late"] - runs["alone"]) < 0.08
    assert runs["twice"] < runs["alone"] - 0.08 and runs["cosine"] > 0.999  # no rate turns a step round
    assert sum(runs["one_line"]) / len(runs["one_line"]) < 0.9


# Wrong answers to the exercise: which rows belong to a process.

WRONG = [
    (
        "def own_rows(values, rank, counts):\n    return values[:counts[0]] if rank == 0 else values[-counts[rank]:]",
        "rank 1 of three",
    ),
    ("def own_rows(values, rank, counts):\n    return values[:counts[rank]]", "rank 1 of two, three rows each"),
    ("def own_rows(values, rank, counts):\n    return values[rank::len(counts)]", "rank 0 of two, three rows each"),
    (
        "def own_rows(values, rank, counts):\n    return values[rank * counts[rank]:(rank + 1) * counts[rank]]",
        "with four rows and two",
    ),
    (
        "def own_rows(values, rank, counts):\n    start = counts[rank - 1] if rank else 0\n"
        "    return values[start:start + counts[rank]]",
        "rank 2 of three",
    ),
    ("def own_rows(values, rank, counts):\n    return values[sum(counts[:rank]):]", "and no others"),
    (
        "def own_rows(values, rank, counts):\n    start = sum(counts[:rank])\n"
        "    return list(values[start:start + counts[rank]])",
        "as a tensor",
    ),
]
RIGHT = [
    "def own_rows(values, rank, counts):\n    return values.split(counts)[rank]",
    "import torch\ndef own_rows(values, rank, counts):\n    return torch.split(values, counts)[rank]",
]

# The diff: with it each process trains with what its own rows earned, so that the step is GRPO's. In two
# processes. The step after the script's own is held beside its definition.

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
SHORT = [("max_steps=40", "max_steps=1")]
