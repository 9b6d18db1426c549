"""What the arguments alone say, before anything is cut: learning rates, the loss's own options, and a single prompt.

Nothing of this is an error, and no log shows it early: no step at all, bounds of the ratio that leave no gradient, a
schedule that is over after one step, a warm-up that is longer
than the run, adapters at a rate that was chosen for whole models, whole models at one that was chosen for supervised
fine-tuning, and a dataset of one row. So each is a suspicion, with the figure that it hangs on.

Upstream: TRL #2872 and X-R1 #66 (LoRA at 5e-7 and 1e-6), hello-agents #770 (5e-5), TRL #2970 (one row).
"""

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import get_scheduler

from failurelab._unwrap import has_adapter
from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.batch import read_step
from failurelab.preflight.judges.rows import dataset_size, generates, prompt_limit
from failurelab.preflight.judges.updates import optimizer_name, own_optimizer, policy_load
from failurelab.preflight.training import Training
from failurelab.rewards import signature

_MOST = 20_000  # steps whose rates are computed
_OVER, _WARM = 0.5, 0.5  # shares: of steps at a rate of nothing, and of the rate that is never reached
_NOTHING = 1e-3  # of the largest rate
# A step of AdamW moves an element by about the rate (three times that after a jump of the gradient). B of an adapter
# begins at 0, so the sum over all planned steps is about the most that it becomes; public runs that learned nothing
# stood at 2e-4 (X-R1 #66) and less.
_LOW_RATE, LOW_SUM = 2e-6, 1e-3
_BY_SCHEDULE = "by the schedule's own values; the cut run is over before that shows"
_RIGHT = (0.1, 0.5, 0.9)  # shares of right completions
# Options that are read with another one alone, and what that must be.
_READ_WITH: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        (
            "vllm_mode", "vllm_gpu_memory_utilization", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
            "vllm_tensor_parallel_size", "vllm_max_model_len", "vllm_max_model_length", "vllm_device", "vllm_dtype",
            "vllm_server_base_url", "vllm_importance_sampling_correction", "vllm_enable_sleep_mode",
        ),
        ("use_vllm", bool),
    ),
    "ref_model_mixup_alpha": ("sync_ref_model", bool),
    "ref_model_sync_steps": ("sync_ref_model", bool),
    "gradient_checkpointing_kwargs": ("gradient_checkpointing", bool),
    "num_train_epochs": ("max_steps", lambda steps: (steps or -1) <= 0),
    "eval_steps": ("eval_strategy", lambda strategy: str(getattr(strategy, "value", strategy)) == "steps"),
    "save_steps": ("save_strategy", lambda strategy: str(getattr(strategy, "value", strategy)) == "steps"),
}  # fmt: skip
_NARROW = 1e-5  # of a bound on ratios; GSPO, whose ratios are means over a sequence, is used with 3e-4
_BY_ARGUMENTS = "by the loss's formula and these arguments; the cut step is compared with the same formula"
_HIGH_RATE, LARGE = 5e-5, 100_000_000  # of a whole model with so many elements


def judge_plan(training: Training) -> Iterator[Finding]:
    """Tell a learning rate that cannot teach in the steps that are planned, and a dataset of one prompt."""
    if not generates(training.trainer):
        return
    if unused := unused_options(training):
        training.notes.append(f"set, and without effect here: {', '.join(unused)}")
    if not hasattr(training.dataset, "__len__") and training.dataset is not None:
        yield from _endless(training)
    if dataset_size(training) == 1:
        yield Finding.suspected(
            "one row",
            "the training dataset has 1 row: every step asks for completions of the same prompt",
            "what it is to learn was not looked at; where all of one prompt's rewards are equal, no step is left",
            "Train on as many different prompts as there are steps, or say why one is enough.",
        )
    yield from _loss_options(training)
    yield from _not_in_force(training)
    rates = planned_rates(training)
    if rates:
        yield from _schedule(rates)
        yield from _rate(training, rates)


def _loss_options(training: Training) -> Iterator[Finding]:
    """Tell options that leave the loss no gradient, or turn it, and a plan of no step.

    The loss of a completion with advantage A is -min(r A, clip(r, 1 - low, 1 + high) A), and r is 1 in the first pass.
    """
    options = training.arguments
    epochs = options.get("num_train_epochs")
    if (options.get("max_steps") or -1) <= 0 and epochs is not None and epochs <= 0:
        said = f"num_train_epochs is {epochs:g}, and max_steps sets no steps: none is made"
        yield _suspect_option("num_train_epochs", said, "Set num_train_epochs or max_steps.")
    beta = options.get("beta")
    if isinstance(beta, (int, float)) and beta < 0:
        paired = "num_generations" not in options  # Online DPO, whose beta is no penalty's
        said = "the loss prefers what was rejected" if paired else "a penalty pays the policy for leaving its reference"
        said = f"beta is {beta:g}: of this sign {said}"
        yield _suspect_option("beta", said, "Set beta to 0.1." if paired else "Set beta to 0, or to 0.001 to 0.1.")
    whole = (options.get("ref_model_mixup_alpha") or 0.0) >= 1 and options.get("ref_model_sync_steps") == 1
    if options.get("sync_ref_model") and beta and whole:
        said = "the reference takes the policy's weights whole after each step (ref_model_sync_steps is 1, "
        said += "ref_model_mixup_alpha 1): the penalty holds the policy near to where it was a step before"
        yield _suspect_option("ref_model_sync_steps", said, "Sync after some hundred steps, or in part.")
    low, delta = options.get("epsilon"), options.get("delta")
    if not isinstance(low, (int, float)):
        return
    high = low if options.get("epsilon_high") is None else options["epsilon_high"]
    kind, bounds = options.get("loss_type"), f"epsilon is {low:g}, epsilon_high {high:g}"
    passes = (options.get("steps_per_generation") or options.get("gradient_accumulation_steps") or 1) * (
        options.get("num_iterations") or 1
    )
    repair = "Set epsilon to 0.2, trl's default, and epsilon_high to no less."
    if kind == "cispo":
        if high <= 0:
            said = f"{bounds}: with loss_type='cispo' no weight is above epsilon_high, so every gradient is 0 or turned"
            yield _suspect_option("epsilon", said, "Set epsilon_high to 5.0, the value of CISPO's authors.")
        return
    if kind == "sapo":
        return
    if low < 0 or high < 0:
        said = f"{bounds}: a ratio of 1 lies outside of the bounds, and completions with advantages "
        said += f"{'above' if high < 0 else 'below'} 0 give no gradient"
        yield _suspect_option("epsilon", said, repair)
    elif max(low, high) < _NARROW and passes > (options.get("gradient_accumulation_steps") or 1):
        said = (
            f"{bounds}, and each generation is trained on more than once: what leaves the first policy is clipped, so "
        )
        yield _suspect_option("epsilon", f"{said}later passes can only go back to it", repair)
    if isinstance(delta, (int, float)) and delta < 1:
        said = (
            f"delta is {delta:g}: it bounds each ratio, which is 1 in the first pass, from above, and completions with"
        )
        yield _suspect_option("delta", f"{said} advantages above 0 give no gradient", "Set delta above 1 + epsilon.")


def _not_in_force(training: Training) -> Iterator[Finding]:
    """Tell values that a script writes for its arguments, and that none of them has.

    A trainer keeps most of them as it is made. A class body sets a default only of a dataclass, and only with a type.
    """
    for name, kept in training.too_late.items():
        said = f"{name} is set to {training.arguments.get(name)!r} after the trainer was made, which keeps {kept!r}"
        why = "what else of it is read from the arguments later is not known"
        yield Finding.suspected("given", said, why, f"Set {name} before the trainer is made.", part=name)
    args = training.trainer.args
    fields = {field.name: field.default for field in dataclasses.fields(args)} if dataclasses.is_dataclass(args) else {}
    for kind in type(args).__mro__:
        if kind.__module__.partition(".")[0] in ("trl", "transformers", "builtins"):
            return
        for name in fields.keys() & vars(kind).keys():
            written, default = vars(kind)[name], fields[name]
            if written != default == training.arguments.get(name):
                said = f"{kind.__name__} writes {name} = {written!r} in its body, and {name} stays {default!r}"
                repair = f"Decorate {kind.__name__} with @dataclass, and write {name} with its type."
                yield _suspect_option(name, said, repair)


def _suspect_option(part: str, said: str, repair: str) -> Finding:
    return Finding.suspected("arguments", said, _BY_ARGUMENTS, repair, part=part)


def judge_groups(training: Training) -> Iterator[Finding]:
    """Note the share of groups that two completions and a reward of two values leave without a gradient (F10).

    A note, and no finding: how often the model is right only a run tells, and a run with two completions can be meant.
    """
    step, lines = read_step(training), training.rewards.lines if training.rewards else []
    weights = signature.weights_of(training.trainer, len(lines[0].rewards)) if lines else []
    rows = ([value if isinstance(value, (int, float)) else 0.0 for value in line.rewards] for line in lines)
    totals = {sum(weight * value for weight, value in zip(weights, row)) for row in rows}
    if step is not None and step.generations == 2 and len(totals) == 2:
        told = (f"{_equal(2, p):.0%} of the groups where {p:.0%} of the completions are right" for p in _RIGHT)
        training.notes.append(
            "num_generations is 2, and the reward has two values "
            f"({', '.join(f'{total:g}' for total in sorted(totals))}): by chance alone both of a group get the same, "
            f"which leaves no gradient (F10), in {', '.join(told)}. With num_generations=8 it is "
            f"{', '.join(f'{_equal(8, p):.0%}' for p in _RIGHT)}"
        )
    yield from ()


def _equal(generations: int, right: float) -> float:
    """Return the share of groups all of whose completions are right, or all wrong, each right with this chance."""
    return right**generations + (1 - right) ** generations


def unused_options(training: Training) -> list[str]:
    """Return the options that are set to another value than their default, and that nothing reads in this run."""
    values, args, without = training.arguments, training.trainer.args, []
    fields = {field.name: field for field in dataclasses.fields(args)} if dataclasses.is_dataclass(args) else {}
    for name, (needs, wanted) in _READ_WITH.items():
        field, value = fields.get(name), values.get(name)
        default = field.default if field and field.default is not dataclasses.MISSING else None
        kept = getattr(value, "value", value) != getattr(default, "value", default)
        if field and kept and value is not None and needs in values and not wanted(values[needs]):
            without.append(f"{name} ({needs} is {getattr(values[needs], 'value', values[needs])})")
    if "max_prompt_length" in fields and values.get("max_prompt_length") and prompt_limit(training) is None:
        without.append("max_prompt_length (this trl cuts no prompt)")
    return without


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
    if adapted and highest <= _LOW_RATE and total <= LOW_SUM:
        yield Finding.suspected(
            "rate",
            f"adapters at a learning rate of {highest:g}: their B begins at 0, and a step of AdamW moves an element by "
            f"about the rate, so about {len(rates)} planned steps in one direction bring it to about {total:.1g}",
            "what that is worth for learning depends on model and task, and takes a whole run to see",
            "Try 1e-5 to 1e-4.",
        )
    elif not adapted and highest >= _HIGH_RATE and size >= LARGE:
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
