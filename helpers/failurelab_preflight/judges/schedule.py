"""The learning rate of each step that a script plans, by its schedule's own values: a cut run ends before that shows.

Upstream: transformers `get_scheduler` and `Trainer.create_scheduler`.
"""

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers import get_scheduler

from failurelab_preflight.answer import Finding
from failurelab_preflight.judges.batch import read_step
from failurelab_preflight.judges.rows import dataset_size, generates
from failurelab_preflight.judges.updates import own_optimizer
from failurelab_preflight.training import Training

_MOST = 20_000  # steps whose rates are computed


def note_rates(training: Training) -> Iterator[Finding]:
    """Keep the learning rates that are planned, before a schedule of the script's own has moved on."""
    training.rates = planned_rates(training) if generates(training.trainer) else []
    yield from ()


def planned_steps(training: Training) -> int | None:
    """Return how many optimizer steps the script plans; None where nobody knows."""
    arguments = training.arguments
    if (arguments.get("max_steps") or -1) > 0:
        return int(arguments["max_steps"])
    step, size = read_step(training), dataset_size(training)
    if step is None or not size:
        return None
    prompts = step.completions / step.generations
    each = max(1, math.floor(size / prompts)) * (arguments.get("num_iterations") or 1)
    return math.ceil((arguments.get("num_train_epochs") or 1) * each)


def planned_rates(training: Training) -> list[float]:
    """Return the learning rate of each planned step, of at most 20,000; empty where it is not known."""
    steps = planned_steps(training)
    if not steps:
        return []
    schedule, own = (*(training.keywords.get("optimizers") or ()), None, None)[1], own_optimizer(training)
    rate = float((own[1].get("lr") if own else training.arguments.get("learning_rate")) or 0)
    try:
        if schedule is not None:
            schedule = _copy(schedule)
        else:  # as the trainer makes it by its arguments
            schedule = get_scheduler(
                training.arguments.get("lr_scheduler_type") or "linear",
                torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate),
                num_warmup_steps=training.trainer.args.get_warmup_steps(steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=training.arguments.get("lr_scheduler_kwargs") or {},
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it steps without its optimizer
            rates = []
            for _ in range(min(steps, _MOST)):
                rates.append(max(group["lr"] for group in schedule.optimizer.param_groups))
                schedule.step()
    except Exception:  # a schedule that needs the loss, or options that are not here: then nothing is said of it
        return []
    return rates


def _copy(schedule: Any) -> Any:
    """Return a copy of the script's schedule, whose optimizer holds numbers in place of the model's tensors."""
    tensors = (tensor for group in schedule.optimizer.param_groups for tensor in group["params"])
    return copy.deepcopy(schedule, {id(tensor): torch.nn.Parameter(torch.zeros(1)) for tensor in tensors})
