"""Evaluation and resuming: what a run comes to only after hours, or where it begins.

One batch of each evaluation set is evaluated in the cut run (`stage.evaluation`), and the script's reward functions are
asked with what they are handed there: columns that only the training set has are missing. Of a checkpoint to resume
from, the folder is looked at: whether it is there, and of this model and trainer. Nothing is loaded from it.

Upstream: transformers `Trainer.train(resume_from_checkpoint=...)` and `get_last_checkpoint`; trl's `RepeatSampler`.
"""

import difflib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from failurelab._unwrap import has_adapter
from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.plan import planned_steps
from failurelab.preflight.judges.updates import policy_load
from failurelab.preflight.repairs import Arguments
from failurelab.preflight.stage import cuts
from failurelab.preflight.training import Training
from failurelab.rewards import signature
from failurelab.rewards.asking import Asker

EVALUATION, RESUME = "evaluation", "resume"
_SHOWN = 4  # names of metrics
_OF_SPEED = ("_runtime", "_per_second")  # ends of the names of metrics that tell how fast it was
_SAME = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")  # of two configurations


def asks_for_evaluation(training: Training) -> bool:
    """Return whether the script asks for evaluation: by its arguments, or by a call."""
    source = training.source.text if training.source else ""
    called = training.calls_evaluate or re.search(r"\btrainer\w*\s*\.\s*evaluate\s*\(", source)
    return bool(cuts.evaluates(training.arguments) or training.arguments.get("eval_on_start") or called)


def judge_evaluation(training: Training) -> Iterator[Finding]:
    """Tell what came of one batch of each evaluation set, which the run has evaluated."""
    if not asks_for_evaluation(training):
        yield Finding.not_applicable(EVALUATION, "the script asks for none")
        return
    if getattr(training.trainer, "eval_dataset", None) is None and not training.evaluations:
        why = "the trainer has no evaluation set: where evaluate() is given one, it is not run here"
        if cuts.evaluates(training.arguments):
            said = "evaluation is asked for (eval_strategy), and the trainer is given no eval_dataset"
            refused = "transformers refuses it in most releases; no edit of the script says which set is meant"
            yield Finding.suspected(EVALUATION, said, refused, "Give eval_dataset, or take eval_strategy out.")
        else:
            yield Finding.not_checked(EVALUATION, why)
        return
    if not training.evaluations:
        yield Finding.not_checked(EVALUATION, training.not_evaluated or "training ended before it")
        return
    for name, evaluation in training.evaluations.items():
        yield from _judge_set(training, name, evaluation.handed, evaluation.error)
    yield from _best_metric(training)


def wanted_metric(arguments: Mapping[str, Any]) -> str:
    """Return what the best checkpoint is chosen by, as transformers looks it up; empty where nothing is chosen.

    Args:
        arguments: as the script gave them: what transformers makes of them is not in them.
    """
    schedule = arguments.get("lr_scheduler_type")
    by_loss = arguments.get("load_best_model_at_end") or getattr(schedule, "value", schedule) == "reduce_lr_on_plateau"
    metric = arguments.get("metric_for_best_model") or ("loss" if by_loss else "")
    return metric if metric.startswith("eval_") or not metric else f"eval_{metric}"


def _best_metric(training: Training) -> Iterator[Finding]:
    """Tell a metric that the best checkpoint is to be chosen by, and that no evaluation returns."""
    metric, evaluations = wanted_metric(training.arguments), list(training.evaluations.values())
    returned = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))
    if not metric or not cuts.evaluates(training.arguments) or any(evaluation.error for evaluation in evaluations):
        return
    # of several sets transformers returns the metrics of all as one
    of_results = [name for name in returned if not name.endswith(_OF_SPEED)]
    if metric in returned:
        said = f"metric_for_best_model {metric} is among the {len(returned)} names that a batch of evaluation returned"
        yield Finding.held(EVALUATION, said, "a name that is not among them would be told", fault="metric")
        yield from _worst_as_best(training, metric)
        yield from _best_by_loss(training, metric, of_results)
        return
    logged = any(metric in evaluation.logged for evaluation in evaluations)
    by_log = f"; this trl logs {metric} and does not return it, as trl 1.5 and later do" * logged
    near = difflib.get_close_matches(metric, of_results, n=1, cutoff=0.75)
    values: dict[str, Any] = {"load_best_model_at_end": False, "metric_for_best_model": None}
    if near or "eval_loss" in returned:
        values = {"metric_for_best_model": near[0] if near else "eval_loss"}
    if values["metric_for_best_model"] == "eval_loss" and training.arguments.get("greater_is_better"):
        values["greater_is_better"] = False
    set_ = " and ".join(f"{name}={value!r}" for name, value in values.items())
    others = ", or upgrade to trl 1.5 or later" * logged
    others += ". A loss of GRPO does not tell how good a model is: better choose no best one" * (
        values["metric_for_best_model"] == "eval_loss"
    )
    nearest = difflib.get_close_matches(metric, of_results, n=_SHOWN, cutoff=0)
    yield Finding(
        EVALUATION,
        f"metric_for_best_model is looked up as {metric}, which is not among the {len(returned)} names that one batch "
        f"of evaluation returned (the most like it: {', '.join(nearest) or 'none'}){by_log}: the first evaluation of "
        "the real run ends in a KeyError",
        f"Set {set_}{others}.",
        undo=Arguments({name: value for name, value in values.items() if name in training.arguments}),
        part="metric_for_best_model",
    )


def _worst_as_best(training: Training, metric: str) -> Iterator[Finding]:
    """Tell a best checkpoint that is the one with the smallest reward."""
    if training.arguments.get("greater_is_better") is False and re.search(r"reward(s/[^/]+/mean)?$", metric):
        said = f"greater_is_better is False for metric_for_best_model {metric}: the best checkpoint is the one with the"
        why = "by the arguments: it shows in the checkpoints of the whole run"
        undo, repair = Arguments({"greater_is_better": True}), "Set greater_is_better=True, or leave it out."
        more = {"undo": undo, "part": "greater_is_better"}
        yield Finding.suspected(EVALUATION, f"{said} smallest reward", why, repair, **more)


def _best_by_loss(training: Training, metric: str, returned: Sequence[str]) -> Iterator[Finding]:
    """Tell a best checkpoint that is chosen by the loss where evaluation returns the reward too.

    See `_left_of_loss`.
    """
    reward = f"{metric.removesuffix('loss')}reward"
    if not metric.endswith("loss") or reward not in returned:
        return
    if training.arguments.get("metric_for_best_model"):
        training.notes.append(
            f"the best checkpoint is chosen by {metric}, which in this trainer does not tell how good a model is: "
            f"{reward} is among what evaluation returns"
        )
        return
    best = training.arguments.get("load_best_model_at_end")
    values = {"metric_for_best_model": reward, "greater_is_better": True}
    yield Finding.suspected(
        EVALUATION,
        f"{'the best checkpoint is chosen' if best else 'the learning rate is lowered'} by {metric}, for "
        f"metric_for_best_model is not given: {_left_of_loss(training.trainer)}. It does not tell how large the reward "
        "is",
        "by the arguments: it shows in the checkpoints of the whole run",
        f"Set metric_for_best_model={reward!r} and greater_is_better=True.",
        undo=Arguments(values),
        part="metric_for_best_model",
        fault="loss",
    )


def _left_of_loss(trainer: Any) -> str:
    """Return what the loss of an evaluation is made of, in words.

    Of a batch that is evaluated as it was drawn, the ratios are 1 and the advantages of a group add up to 0. Where each
    completion counts the same, beta times the KL divergence is left, which is smallest where nothing was learned.
    """
    kinds = {kind.__name__ for kind in type(trainer).__mro__}
    beta = 0.0 if "RLOOTrainer" in kinds else getattr(trainer, "beta", None) or 0.0  # RLOO has it in the reward
    left = f"about beta ({beta:g}) times the KL divergence, which grows as the policy learns" if beta else "about 0"
    if getattr(trainer.args, "loss_type", "grpo") != "grpo":  # long completions weigh more
        left += ", beside what the lengths of the completions make of it"
    return f"the advantages of a group add up to 0, and the loss of an evaluation is {left}"


def _judge_set(training: Training, name: str, handed: dict[int, Any], error: str) -> Iterator[Finding]:
    """Judge one evaluation set by what each reward function was handed, and the error that ended the batch."""
    which = f"the evaluation set {name!r}" if name else "the evaluation set"
    functions, lacking = list(training.trainer.reward_funcs), False
    for place, given in handed.items():
        function, known = functions[place], training.handed.get(place)
        if isinstance(function, torch.nn.Module) or known is None:
            continue
        missing = [column for column in signature.asked_columns(function) if column in known and column not in given]
        before, after = (_ask(function, inputs) for inputs in (known, given))
        raises = after.error if not before.error and not before.unasked else ""
        if not missing and not raises:
            continue
        lacking, key = True, signature.key_of(functions, place)
        columns = f", which lacks the column {' and '.join(map(repr, missing))}" * bool(missing)
        said = f"; it raises {raises}" if raises else "; it goes on without it, and the score means nothing"
        repair = f"Give it {' and '.join(map(repr, missing)) or 'the same columns'}, as the training set has."
        yield Finding(
            EVALUATION,
            f"{key} is asked about {which}{columns}{said}: the run ends, or errs, at its first evaluation",
            repair,
            tried="with rows of the training set in its place the same function is called without an error",
            part=f"reward_funcs[{place}]",
            fault=name,
        )
    if error and training.trains_evaluated:
        yield Finding(
            EVALUATION,
            f"one batch of {which} ends in {error}",
            "Look at what its rows have otherwise than those of the training set.",
            tried="a batch of the training set in its place is evaluated without an error",
            part=name or "eval_dataset",
        )
    elif error and not _evaluates_itself(training.trainer):
        said = f"one batch of {which} ends in {error}: the GRPOTrainer of this release has no evaluation of its own"
        why = "one of the training set ends so too, and no edit of the script undoes it"
        yield Finding.suspected(EVALUATION, said, why, "Take eval_strategy out, or upgrade to trl 0.15 or later.")
    elif error:
        yield Finding.not_checked(
            EVALUATION, f"one batch of {which} ends in {error}, and so does one of the training set: perhaps by the cut"
        )
    elif not lacking:
        yield Finding.held(
            EVALUATION,
            f"one batch of {which} was evaluated, and {len(handed)} reward function(s) were handed what they ask for",
            "a set without a column that a function asks for would be told",
        )


def _evaluates_itself(trainer: Any) -> bool:
    """Whether a trainer makes its inputs in an evaluation too; GRPO's rows are no inputs of a model."""
    kinds = [kind for kind in type(trainer).__mro__ if kind.__name__ == "GRPOTrainer"]
    return not kinds or any("prediction_step" in vars(kind) for kind in kinds)


def _ask(function: Any, inputs: dict[str, Any]) -> Any:
    count = len(inputs["completions"])

    def make(places: Any) -> dict[str, Any]:
        rows = {name: value for name, value in inputs.items() if isinstance(value, list) and len(value) == count}
        return {**inputs, **{name: [value[place] for place in places] for name, value in rows.items()}}

    return Asker(function, 5.0).ask(make, count)


def judge_resume(training: Training) -> Iterator[Finding]:
    """Look at the folder that training goes on from."""
    asked, output = training.resume, str(training.arguments.get("output_dir") or "")
    if not asked:
        if training.arguments.get("resume_from_checkpoint"):
            said = "resume_from_checkpoint is an argument of the config alone, and no Trainer reads it there"
            why = "train() begins anew, if nothing else in the script gives it on"
            repair = "Give it to the call: trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)."
            yield Finding.suspected(RESUME, said, why, repair)
            return
        yield Finding.not_applicable(RESUME, "training begins anew")
        return
    folder = _last_checkpoint(output) if asked is True else pathlib.Path(str(asked))
    if folder is None or not folder.is_dir():
        what = f"{output or 'output_dir'} has no checkpoint" if asked is True else f"{asked} is not there"
        said = f"training is to go on from a checkpoint, and {what} (from {os.getcwd()}): transformers ends in an error"
        why = "it may lie on the machine that trains"
        yield Finding.suspected(RESUME, said, why, "Resume only where a checkpoint is there: get_last_checkpoint.")
        return
    if faults := list(_faults(training, folder)):
        said, why = f"{folder}: {'; '.join(faults)}", "by its files alone; nothing was loaded from it"
        yield Finding.suspected(RESUME, said, why, "Give a checkpoint that this script's own run has saved.")
        return
    why = f"{folder} is of this model and trainer by its files; whether they load, and what is skipped, is not tried"
    yield Finding.not_checked(RESUME, why)


def _last_checkpoint(output: str) -> pathlib.Path | None:
    """Return the last checkpoint of a folder, as transformers finds it."""
    folders = pathlib.Path(output).glob("checkpoint-*") if output else ()
    numbered = [folder for folder in folders if folder.is_dir() and folder.name.rpartition("-")[2].isdigit()]
    return max(numbered, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def _faults(training: Training, folder: pathlib.Path) -> Iterator[str]:
    """Yield why a folder is no checkpoint of this model and trainer."""
    state = _read(folder / "trainer_state.json")
    if state is None:
        yield "it has no trainer_state.json that can be read, so it is no checkpoint of a Trainer"
        return
    steps, done = planned_steps(training), state.get("global_step")
    if steps and isinstance(done, int) and done >= steps:
        yield f"it is of step {done}, and about {steps} are planned: the run ends at once"
    adapter, config = _read(folder / "adapter_config.json"), _read(folder / "config.json")
    if has_adapter(training.trainer.model) and adapter is None:
        yield "the model has adapters, and it has no adapter_config.json"
    elif adapter is not None and not has_adapter(training.trainer.model):
        yield "it holds an adapter, and the model has none"
    load = policy_load(training)
    if config is not None and load is not None:
        pairs = {name: (config.get(name), getattr(load.config, name, None)) for name in _SAME}
        other = [f"{name} {theirs} and not {own}" for name, (theirs, own) in pairs.items() if theirs and own != theirs]
        if other:
            yield f"it is of another model: {', '.join(other)}"
    if adapter is not None:
        own = next(iter(getattr(training.trainer.model, "peft_config", {}).values()), None)
        rank = getattr(own, "r", None)
        if rank and adapter.get("r") and adapter["r"] != rank:
            yield f"its adapter has r={adapter['r']}, and the model's has r={rank}"


def _read(file: pathlib.Path) -> dict[str, Any] | None:
    """Return what a JSON file holds; None where there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
