"""Batch arithmetic: what trl refuses at the size that the script asked for, and what one optimizer step really is.

`per_device_train_batch_size` counts prompts in trl 0.14 and completions from 0.15 on; groups may be cut across devices,
so that a batch which one GPU takes is refused on three, and the other way round. Later releases refuse such a batch
before anything is trained: it is handed to them uncut (`cuts.is_refused`), and their error is told. trl 0.14 refuses
nothing: one completion a prompt has no standard deviation, every advantage is NaN, and so are the weights then. That
numbers divide is said after training, beside the prompts that arrived: trl 0.15 repeats none of a stream.

Upstream: TRL #2776 (the batch counts completions), #2858 and open-r1 #249 (refused sizes), PR #6024 (a loss scaled by
the way that batches are cut).
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from failurelab import failures, plants
from failurelab.failures import verdicts
from failurelab.measure import counts
from failurelab_preflight.finding import Finding
from failurelab_preflight.judges.rows import dataset_size, of_trl
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.stage import cuts
from failurelab_preflight.training import Training

_REFUSALS = re.compile(
    r"divisible by (the )?(num_generations|number of generations|global batch size)|at least 2 generations per prompt"
    r"|can not be both configured|Group size must be|`num_generations`.*(divisible|multiple)"
)


def refused(error: BaseException) -> Finding | None:
    """Return the finding that an error of a trl config or trainer stands for; None if it is not about batches."""
    message = " ".join(str(error).split())
    if not isinstance(error, ValueError) or not _REFUSALS.search(message):
        return None
    return Finding("F22", f"trl refuses it: {message}", "Change the one number so that the other divides it.")


@dataclasses.dataclass(frozen=True)
class BatchStep:
    """One optimizer step at the size that the script asked for.

    Attributes:
        generations: completions for each prompt.
        completions: all of a step, over all devices.
        accumulated: batches whose gradients are added.
        unit: what per_device_train_batch_size counts.
        per_round: completions in one round of generation; None if this trl does not cut groups.
        rounds: whether trl's sampler draws whole rounds only, and drops the rest.
    """

    generations: int
    completions: int
    accumulated: int
    unit: str
    per_round: int | None = None
    rounds: bool = False


def read_step(training: Training) -> BatchStep | None:
    """Return what one optimizer step is; None for a trainer without generations."""
    arguments, config, world = training.arguments, getattr(training.trainer, "args", None), max(training.world_size, 1)
    generations, device = arguments.get("num_generations"), arguments.get("per_device_train_batch_size")
    if not generations or not device:
        return None
    accumulated = arguments.get("gradient_accumulation_steps") or 1
    each = device * world
    if cuts.counts_prompts():
        return BatchStep(generations, each * accumulated * generations, accumulated, "prompts")
    if not hasattr(config, "steps_per_generation"):
        return BatchStep(generations, each * accumulated, accumulated, "completions", each)
    steps, per_round = arguments.get("steps_per_generation"), arguments.get("generation_batch_size")
    if steps is None:
        steps = max(1, per_round // each) if per_round else accumulated
    return BatchStep(generations, each * accumulated, accumulated, "completions", each * steps, rounds=True)


def judge_batch(training: Training) -> Iterator[Finding]:
    """Tell what a step of the batch is, which trl takes (see `refused`)."""
    step = read_step(training)
    if step is None:
        return
    if not of_trl(training.trainer):
        name = type(training.trainer).__name__
        yield Finding.not_checked("F22", f"{name} is no trainer of trl's, so what its batch counts is its own")
        return
    generations, per_round = step.generations, step.per_round
    prompts: Sequence[Any] = (training.reward_inputs or {}).get("prompts") or ()
    drawn = getattr(training.trainer, "num_generations", None) or generations  # as it was cut
    arrived = counts.of_groups(prompts, drawn) if prompts else {}
    whole = (per_round or 0) // max(training.world_size, 1) % generations == 0
    if arrived.get("completions_left_over") or not whole:  # of one process, where a group lies on several in the run
        arrived = {}
    measured = arrived | {"completions_a_group": generations, "completions_left_over": (per_round or 0) % generations}
    controls = {
        "one completion more": plants.one_more(range(per_round or generations), generations),
        "one completion a prompt": plants.one_each(prompts),
        "prompts that are not repeated": plants.not_repeated(prompts, drawn),
    }
    evidence = (
        f"one optimizer step is {step.completions} completions of {step.completions / generations:g} prompts "
        f"(per_device_train_batch_size {training.arguments['per_device_train_batch_size']} counts {step.unit}, "
        f"{max(training.world_size, 1)} device(s), {step.accumulated} accumulated)"
    )
    yield from _rows(training, step)
    if settled := settle("F22", [measured], controls, evidence):
        yield settled
    elif mixed := measured.get("groups_mixed") if generations > 1 and not measured["completions_left_over"] else 0:
        said = f"{mixed} of {measured['groups']} groups that arrived hold completions of several prompts"
        yield Finding.not_checked("F22", f"the numbers divide each other, but {said}: see F21")
    else:
        judged = verdicts.judge(failures.get("F22"), [measured])
        yield Finding(
            "F22",
            f"{judged.says}. This trl takes it: the number was set after the config was made, or it has no rule for it",
            "Give the config a num_generations of 2 or more that divides a round of generation, where it is made.",
            part="num_generations",
            ends=generations > 1,
        )


def _rows(training: Training, step: BatchStep) -> Iterator[Finding]:
    """The sampler drops prompts that do not fill a round of generation; where none is filled, nothing is trained."""
    size = dataset_size(training)
    prompts = (step.per_round or 0) // step.generations if step.rounds else 0
    if size and size < prompts:
        yield Finding(
            "F22",
            f"the dataset has {size} rows, and one round of generation takes {prompts} prompts: trl's sampler drops "
            "what does not fill a round, so no step is made",
            f"Set a batch of at most {size * step.generations} completions for a round of generation, or more rows.",
            part="train_dataset",
        )
