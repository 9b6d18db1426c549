"""Notebook 13: with the diff each process trains with what its own rows earned, so that the step is GRPO's.

In two processes. The step after the script's own is held beside its definition.
"""

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
