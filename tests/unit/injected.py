"""Faults injected into a guard: an error at each line that it runs for itself, in a training run for each.

A guard asks the trainer, its arguments, the model, its config, its forward, `generate` and the tokenizer, and any of
them may raise, in ways that nobody foresees. Every such question is a line of `failurelab`. So one run without a fault
lists the lines that a guard runs, and then each line raises once, in a run of its own. The run must go on, to the
weights of a run without a guard, and the guard must say so in one GuardWarning.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib.metadata
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import transformers
from packaging.version import Version

import failurelab
from failurelab import guards, logits
from failurelab.guards.base import Guard
from failurelab_course.experiments import models, trainers
from failurelab_course.experiments.second_engine import SecondEngine

HOUSE = str(pathlib.Path(failurelab.__file__).parent) + os.sep
Line = tuple[str, int]  # a file's path, and the number


class Fault(RuntimeError):
    """What was injected."""


@dataclasses.dataclass(frozen=True)
class Injected:
    """What became of the runs of one guard.

    Attributes:
        lines: that the guard ran for itself, in all runs without a fault.
        faults: runs with a fault at one of them.
        went_on: runs that trained to the weights of a run without a guard.
        told: runs in which the guard said, in one GuardWarning, that it could not check.
        others: what other runs ended in, by line.
        outside: source lines of `failurelab` that ran for the guard where no error is caught; those of `base`, which
            catches, and of `handles`, which hands on, are left out.
    """

    lines: int
    faults: int
    went_on: int
    told: int
    others: dict[Line, str]
    outside: tuple[str, ...]


@contextlib.contextmanager
def lines_run(fault: Line | None = None) -> Iterator[tuple[dict[Line, None], dict[Line, None]]]:
    """Yield the lines of `failurelab` that run inside a guard's `_check`, and those that run outside of it.

    Args:
        fault: the line that raises a Fault when it is first run inside.
    """
    inside: dict[Line, None] = {}
    outside: dict[Line, None] = {}

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(HOUSE) else None

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            checked = any(code is Guard._check.__code__ for code in _callers(frame))
            (inside if checked else outside).setdefault(line)
            if checked and line == fault:
                raise Fault("injected")  # ends the tracing, too
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield inside, outside
    finally:
        sys.settrace(before)


def _callers(frame: FrameType | None) -> Iterator[CodeType]:
    while frame := frame.f_back:
        yield frame.f_code


class LateScores(transformers.Trainer):
    """A trainer with a `compute_loss` of its own, which makes all rows of logits and scores by the wrong ones."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean negative log-probability of the last tokens, each by the row that has read it."""
        ids = inputs["input_ids"]
        rows = model(input_ids=ids).logits[:, -2:].log_softmax(-1)
        return -rows.gather(-1, ids[:, -2:, None]).mean()


def _late_scores(model: Any, tokenizer: Any) -> Any:
    ids = [tokenizer(f"{prompt}{answer}")["input_ids"] for prompt, answer in models.sums()]
    rows = [{"input_ids": row, "labels": row} for row in ids if len(row) == 6]
    folder = tempfile.TemporaryDirectory()
    arguments = transformers.TrainingArguments(
        folder.name, max_steps=2, per_device_train_batch_size=4, save_strategy="no", report_to=[], disable_tqdm=True,
        remove_unused_columns=False, use_cpu=True,
    )  # fmt: skip
    trainer = LateScores(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.folder = folder  # removed with the trainer
    return trainer


def _grpo(model: Any, tokenizer: Any, **options: Any) -> Any:
    """GRPO in which nothing is wrong, also in stacks whose trl asks for logits by a name that the model swallows."""
    if Version(importlib.metadata.version("trl")) < Version("1.15"):
        logits.repair(model)
    rows = models.rows().select(range(150, 166))
    options = {"reward": _alternate} | options
    return trainers.grpo(model, tokenizer, steps=2, prompts_per_step=4, num_generations=2, rows=rows, **options)


def _alternate(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(number % 2) for number in range(len(completions))]


def _cut_off(model: Any, tokenizer: Any) -> Any:
    """Reentrant checkpointing and frozen embeddings, without the hook that transformers 5 sets along with it."""
    model.get_input_embeddings().requires_grad_(False)
    function = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    return _grpo(model, tokenizer)


def _partitioned(model: Any, tokenizer: Any) -> Any:
    """Parameters and a hook that look like ZeRO-3's, and do nothing."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number

    def hook(*_: Any) -> None: ...

    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model.model.register_forward_hook(hook)
    return _grpo(model, tokenizer)


def _flat(model: Any, tokenizer: Any) -> Any:
    return _grpo(model, tokenizer, reward=lambda completions, **_: [0.0] * len(completions))


def _rounded(model: Any, tokenizer: Any) -> Any:
    return _grpo(model.to(torch.bfloat16), tokenizer, learning_rate=1e-6)


def _two_engines(model: Any, tokenizer: Any, **wrong: Any) -> Any:
    """A second engine, where trl can have one of one's own."""
    engine = SecondEngine(model, tokenizer, **wrong)
    trainer = _grpo(model, tokenizer)
    if hasattr(trainer, "rollout_func"):
        trainer.rollout_func = engine
    return trainer


def _other_temperature(model: Any, tokenizer: Any) -> Any:
    """Tokens are drawn at a temperature at which they are not scored."""
    trainer = _two_engines(model, tokenizer, temperature=0.5)
    if not hasattr(trainer, "rollout_func"):
        trainer.generation_config.temperature = 0.5
    return trainer


# For each guard: how it is made, a run that it finds nothing wrong with, and one that it finds something in. In the
# first it is to stop what it finds, in the second to warn.
GUARDS: dict[str, tuple[Callable[[Any, str], Guard], Sequence[Callable[[Any, Any], Any]]]] = {
    "GradientGuard": (lambda trainer, action: guards.GradientGuard(action), (_grpo, _cut_off)),
    "RolloutGuard": (
        lambda trainer, action: guards.RolloutGuard(action, prompts=["3+4=", "12+19="], max_new_tokens=2),
        (_grpo, functools.partial(_grpo, gradient_checkpointing=True)),
    ),
    "LogitsGuard": (
        lambda trainer, action: guards.LogitsGuard(action, log_prob_function=logits.completion_logps),
        (_grpo, _late_scores),
    ),
    "Zero3Guard": (lambda trainer, action: guards.Zero3Guard(trainer, action), (_grpo, _partitioned)),
    "PlacementGuard": (lambda trainer, action: guards.PlacementGuard(action), (_grpo, _late_scores)),
    "RewardGuard": (lambda trainer, action: guards.RewardGuard(trainer, action, groups=4), (_grpo, _flat)),
    "UpdateGuard": (lambda trainer, action: guards.UpdateGuard(action, steps=2), (_grpo, _rounded)),
    "EngineMismatchGuard": (
        lambda trainer, action: guards.EngineMismatchGuard(trainer, action),
        (_two_engines, _other_temperature),
    ),
}


def inject(name: str, every: int = 1) -> Injected:
    """Inject a fault at each line that a guard runs for itself.

    Args:
        name: of GUARDS.
        every: only at every so many lines.
    """
    guard, runs = GUARDS[name]
    lines = count = went_on = told = 0
    others: dict[Line, str] = {}
    texts: dict[str, None] = {}
    gc.freeze()  # each trainer collects at its end, which takes a second with all that is imported
    for build, action in zip(runs, ("stop", "warn")):
        make = functools.partial(guard, action=action)
        weights, _, (_, repairs) = _train(build, None)
        _, _, (inside, outside) = _train(build, make)
        own = [line for line in outside if line not in repairs and not line[0].endswith(("base.py", "handles.py"))]
        texts |= {_source(line): None for line in own}
        lines += len(inside)
        for line in list(inside)[::every]:
            count += 1
            try:
                trained, messages, _ = _train(build, make, line)
            except Exception as error:
                others[line] = f"{type(error).__name__}: {error}"
                continue
            same = all(torch.equal(*pair) for pair in zip(weights, trained))
            alone = sum("injected" in message or "Fault" in message for message in messages) == 1
            went_on, told = went_on + same, told + alone
            if not (same and alone):
                others[line] = f"same weights: {same}; {messages}"
    gc.unfreeze()
    return Injected(lines, count, went_on, told, others, tuple(texts))


def _train(
    build: Callable[[Any, Any], Any], make: Callable[[Any], Guard] | None, fault: Line | None = None
) -> tuple[list[torch.Tensor], list[str], Any]:
    """Return the weights after a run, the guard's messages, and the lines that were run."""
    model, tokenizer = copy.deepcopy(_loaded())
    with warnings.catch_warnings(record=True) as caught, lines_run(fault) as run:
        warnings.simplefilter("always")
        transformers.set_seed(0)
        trainer = build(model, tokenizer)
        if make is not None:
            trainer.add_callback(make(trainer))
        run[0].clear(), run[1].clear()
        trainer.train()
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, guards.GuardWarning)]
    return [parameter.detach() for parameter in trainer.model.parameters()], messages, run


@functools.cache
def _loaded() -> tuple[Any, Any]:
    return models.load("tiny")


def _source(line: Line) -> str:
    path, number = line
    return pathlib.Path(path).read_text(encoding="utf-8").splitlines()[number - 1].strip()
