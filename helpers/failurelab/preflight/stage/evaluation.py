"""One evaluation batch, where the script asks for evaluation: first rows, and rewards that differ in place of its own.

An error there would end the real run at its first evaluation, hours after its start. What the trainer hands to each
reward function is noted in `Training.evaluated`; the functions themselves are asked about it afterwards.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from failurelab.preflight.stage import cuts
from failurelab.preflight.training import Training


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What came of one batch of an evaluation set.

    Attributes:
        handed: what each reward function was handed, by its place.
        error: that ended it, with its class; empty if none.
        metrics: the names of what `evaluate()` returned, which `metric_for_best_model` is looked up in.
        logged: the names of what was logged meanwhile; trl before 1.5 logs rewards and does not return them.
    """

    handed: dict[int, Any] = dataclasses.field(default_factory=dict)
    error: str = ""
    metrics: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()


def evaluation_sets(trainer: Any) -> dict[str, Any]:
    """Return the evaluation sets of a trainer by name, of several; the only one has the name ""."""
    dataset = getattr(trainer, "eval_dataset", None)
    if dataset is None:
        return {}
    return dict(dataset) if isinstance(dataset, Mapping) else {"": dataset}


def evaluate_once(training: Training, evaluate: Callable[..., Any], dataset: Any, name: str = "") -> Evaluation:
    """Evaluate the first rows of a dataset, and return what came of it.

    Args:
        training: whose rewards differ, as `rewards.differing_rewards` makes them.
        evaluate: the trainer's own method.
        dataset: an evaluation set as the trainer has it.
        name: of the set, where the trainer has several.
    """
    trainer, metrics = training.trainer, None
    before, prefix = len(trainer.state.log_history), {"metric_key_prefix": f"eval_{name}"} if name else {}
    few = dataset.select(range(min(len(dataset), cuts.PROMPTS))) if hasattr(dataset, "select") else dataset
    training.evaluated = {}
    with _whole_groups(trainer):
        try:
            metrics = evaluate(eval_dataset=few, **prefix)
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return Evaluation(dict(training.evaluated), said)
    logged = tuple(dict.fromkeys(name for record in trainer.state.log_history[before:] for name in record))
    return Evaluation(dict(training.evaluated), "", tuple(metrics or ()), logged)


@contextlib.contextmanager
def _whole_groups(trainer: Any) -> Iterator[None]:
    """Inside, a batch of an evaluation holds one prompt's completions, as many as were cut to."""
    generations = getattr(trainer, "num_generations_eval", None) or getattr(trainer, "num_generations", 0)
    if not generations or cuts.counts_prompts():
        yield
        return
    with mock.patch.object(trainer.args, "per_device_eval_batch_size", generations):
        yield
