"""The kind `step`: a trainer whose optimizer steps are held against the textbook, the first one and a later one.

As the kind `trainer`. In addition the gradients of two steps are compared with those of GRPO's definition. The first
step cannot show everything: there the policy is its own reference, and every ratio is 1.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from failurelab import textbook
from failurelab_course.labs.checker.base import CheckRun
from failurelab_course.labs.checker.kinds import trainer as trainer_kind

STEPS = (1, 8)  # at the later one the weights have moved; a wrong fix is stopped behind it
NOTHING = textbook.Apart(0.0, 0.0, 1.0)  # of a step whose rewards leave no gradient


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Build the script's trainer, train it, and fill in `run.metrics`."""
    trainer_kind.measure(script, run, _compared)


@contextmanager
def _compared(trainer: Any, run: CheckRun) -> Iterator[None]:
    metrics = run.metrics
    metrics |= {"step_cosine_first": None, "step_cosine": None, "step_size": None, "step_found": None}
    metrics["other_texts"] = None
    metrics["beta"] = trainer.args.beta
    with textbook.compare(trainer, STEPS, with_suspects=False) as comparison:
        try:
            yield
        finally:
            reports = comparison.reports
            if reports:
                metrics["other_texts"] = any(report.texts for report in reports)
            if reports and all(report.verdict != "NOT CHECKED" for report in reports):
                apart = [report.apart or NOTHING for report in reports]
                metrics["step_cosine_first"] = apart[0].cosine
                metrics["step_cosine"] = min(each.cosine for each in apart)
                metrics["step_size"] = max((each.size for each in apart), key=lambda size: abs(size - 1))
                metrics["step_found"] = next((report.named for report in reports if report.named), "")
