"""What the arguments alone say, before anything is cut: learning rates, and a single prompt.

Nothing of this is an error, and no log shows it early: a schedule that is over after one step, a warm-up that is longer
than the run, adapters at a rate that was chosen for whole models, whole models at one that was chosen for supervised
fine-tuning. So each is a suspicion, with the figure that it hangs on. That all rows have one prompt is a note.

Upstream: TRL #2872 and X-R1 #66 (LoRA at 5e-7 and 1e-6), hello-agents #770 (5e-5), TRL #2970 (one row).
"""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import get_scheduler

from failurelab._unwrap import has_adapter
from failurelab_preflight.answer import Finding
from failurelab_preflight.judges.batch import read_step
from failurelab_preflight.judges.rows import dataset_size, generates, prompted
from failurelab_preflight.judges.updates import optimizer_name, own_optimizer, policy_load
from failurelab_preflight.rewards.forms import last_text
from failurelab_preflight.rewards.table import quote
from failurelab_preflight.training import Training

_MOST, _ROWS = 20_000, 256  # steps whose rates are computed, and rows whose prompts are read
_OVER, _WARM = 0.5, 0.5  # shares: of steps at a rate of nothing, and of the rate that is never reached
_NOTHING = 1e-3  # of the largest rate
# A step of AdamW moves an element by about the rate (three times that after a jump of the gradient). B of an adapter
# begins at 0, so the sum over all planned steps is about the most that it becomes; public runs that learned nothing
# stood at 2e-4 (X-R1 #66) and less.
_LOW_RATE, _LOW_SUM = 2e-6, 1e-3
_BY_SCHEDULE = "by the schedule's own values; the cut run is over before that shows"
_HIGH_RATE, _LARGE = 5e-5, 100_000_000  # of a whole model with so many elements


def judge_plan(training: Training) -> Iterator[Finding]:
    """Tell a learning rate that cannot teach in the steps that are planned, and a dataset of one prompt."""
    if not generates(training.trainer):
        return
    if not hasattr(training.dataset, "__len__") and training.dataset is not None:
        yield from _endless(training)
    prompts = [row["prompt"] for row in prompted(training, _ROWS)]
    if len({repr(prompt) for prompt in prompts}) == 1:
        training.notes.append(f"all {len(prompts)} rows that were read have one prompt, {quote(last_text(prompts[0]))}")
    rates = planned_rates(training)
    if rates:
        yield from _schedule(rates)
        yield from _rate(training, rates)


def _endless(training: Training) -> Iterator[Finding]:
    """Tell a dataset without a length, of which nobody knows when an epoch is over: transformers asks for steps."""
    if (training.arguments.get("max_steps") or -1) > 0:
        return
    kind = type(training.dataset).__name__
    yield Finding(
        "given",
        f"train_dataset is of the class {kind}, which has no length, and max_steps is not set: transformers refuses it",
        "Set max_steps to the optimizer steps that you want.",
        part="max_steps",
        tried=f"with max_steps={training.trainer.args.max_steps}, of the cut, it trains",
        ends=True,
    )


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


def _schedule(rates: Sequence[float]) -> Iterator[Finding]:
    highest, steps = max(rates), len(rates)
    if not highest:
        said = f"the learning rate is 0 in all of about {steps} planned steps: none of them changes the model"
        yield Finding.suspected("rate", said, _BY_SCHEDULE, "Set learning_rate: 1e-6 for whole models, 1e-5 for LoRA.")
        return
    dead = [place for place, rate in enumerate(rates) if rate <= _NOTHING * highest]
    if len(dead) > _OVER * steps and steps > 2:
        after = next(place for place in dead if place > rates.index(highest)) if dead[-1] > rates.index(highest) else 0
        yield Finding.suspected(
            "rate",
            f"the learning rate is 0 for {len(dead)} of about {steps} planned steps"
            + (f", from step {after + 1} on" if after else ""),
            _BY_SCHEDULE,
            "Make the schedule for the optimizer steps of the whole run: rows x epochs / prompts of a step.",
        )


def _rate(training: Training, rates: Sequence[float]) -> Iterator[Finding]:
    peak, highest, total = float(training.arguments.get("learning_rate") or 0), max(rates), sum(rates)
    own = own_optimizer(training)
    if not own and peak and highest < _WARM * peak:
        yield Finding.suspected(
            "rate",
            f"the learning rate of {peak:g} is never reached: it is {highest:g} at most in about {len(rates)} planned "
            "steps, which are fewer than the steps of its warm-up",
            _BY_SCHEDULE,
            "Set warmup_steps to a small part of the steps, or train longer.",
        )
        return
    kind = str(getattr(own[0], "__name__", own[0])).lower() if own else optimizer_name(training)
    if not highest or ("sgd" in kind if own else "adamw" not in kind):  # whose step is the rate times the gradient
        return
    adapted, size = has_adapter(training.trainer.model), policy_size(training)
    if adapted and highest <= _LOW_RATE and total <= _LOW_SUM:
        yield Finding.suspected(
            "rate",
            f"adapters at a learning rate of {highest:g}: their B begins at 0, and a step of AdamW moves an element by "
            f"about the rate, so about {len(rates)} planned steps in one direction bring it to about {total:.1g}",
            "what that is worth for learning depends on model and task, and takes a whole run to see",
            "Try 1e-5 to 1e-4.",
        )
    elif not adapted and highest >= _HIGH_RATE and size >= _LARGE:
        yield Finding.suspected(
            "rate",
            f"a whole model of about {size / 1e9:.1f} billion elements at a learning rate of "
            f"{highest:g}, where trl's own default for GRPO is 1e-6: policies were seen to collapse so",
            "whether this one does takes a whole run to see; kl and entropy show it first",
            "Begin with 1e-6 to 1e-5.",
        )


def policy_size(training: Training) -> int:
    """Return about how many elements the policy has before it is cut; 0 where its configuration says too little."""
    load = policy_load(training)
    return 0 if load is None else _elements(load.config)


def _elements(config: Any) -> int:
    """Return about how many elements a decoder of this configuration has; 0 where it says too little."""
    config = getattr(config, "text_config", None) or config
    width, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    if not isinstance(width, int) or not isinstance(layers, int):
        return 0
    inner = getattr(config, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * width
    return layers * (3 * width * width + 3 * width * inner) + (getattr(config, "vocab_size", None) or 0) * width
