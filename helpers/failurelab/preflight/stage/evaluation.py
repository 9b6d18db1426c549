"""One evaluation batch, where the script asks for evaluation: first rows, and rewards that differ in place of its own.

An error there would end the real run at its first evaluation, hours after its start. What the trainer hands to each
reward function is noted in `Training.evaluated`; the functions themselves are asked about it afterwards.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from failurelab.preflight.stage import cuts
from failurelab.preflight.training import Training


def evaluation_sets(trainer: Any) -> dict[str, Any]:
    """Return the evaluation sets of a trainer by name, of several; the only one has the name ""."""
    dataset = getattr(trainer, "eval_dataset", None)
    if dataset is None:
        return {}
    return dict(dataset) if isinstance(dataset, Mapping) else {"": dataset}


def evaluate_once(training: Training, evaluate: Callable[..., Any], dataset: Any) -> tuple[dict[int, Any], str]:
    """Evaluate the first rows of a dataset; return what each reward function was handed, by place, and the error.

    Args:
        training: whose rewards differ, as `rewards.differing_rewards` makes them.
        evaluate: the trainer's own method.
        dataset: an evaluation set as the trainer has it.
    """
    trainer = training.trainer
    few = dataset.select(range(min(len(dataset), cuts.PROMPTS))) if hasattr(dataset, "select") else dataset
    training.evaluated = {}
    with _whole_groups(trainer):
        try:
            evaluate(eval_dataset=few)
        except Exception as error:
            return dict(training.evaluated), f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return dict(training.evaluated), ""


@contextlib.contextmanager
def _whole_groups(trainer: Any) -> Iterator[None]:
    """Inside, a batch of an evaluation holds one prompt's completions, as many as were cut to."""
    generations = getattr(trainer, "num_generations_eval", None) or getattr(trainer, "num_generations", 0)
    if not generations or cuts.counts_prompts():
        yield
        return
    with mock.patch.object(trainer.args, "per_device_eval_batch_size", generations):
        yield
