"""Notebook 14: with the diff the loss is given the ids that were drawn, and a mask of who wrote each."""

MEASURE = """
trainer.args.max_steps = 1
rows = [row for row in trainer.state.log_history if "reward" in row]
clipped = rows[-1]["completions/clipped_ratio"]
from failurelab import textbook

with textbook.compare(trainer, with_suspects=False) as comparison:
    trainer.train()
report = comparison.report
metrics = {"verdict": report.verdict, "clipped": clipped}
healed = report.verdict == "HELD" and clipped < 0.5
"""
SHORT = [("max_steps=40, logging_steps=10", "max_steps=1, logging_steps=1")]
