"""Faults injected into a guard: an error at each line that it runs for itself, in a training run for each.

A guard asks the trainer, its arguments, the model, its config, its forward, `generate` and the tokenizer, and any of
them may raise, in ways that nobody foresees. Every such question is a line of `failurelab`. So one run without a fault
lists the lines that a guard runs, and then each line raises once, in a run of its own. The run must go on, to the
weights of a run without a guard, and the guard must say so in one GuardWarning.
"""

import contextlib
import copy
import functools
import importlib.metadata
import os
import pathlib
import sys
import tempfile

import torch
import transformers
from engine import Engine
from packaging.version import Version
from small import alternate, checkpoint, said

import failurelab
from failurelab import failures, guards, logits
from failurelab.guards.base import Guard
from failurelab_course.experiments import models, trainers

HOUSE = str(pathlib.Path(failurelab.__file__).parent) + os.sep


class Fault(Exception):
    """What was injected: of no kind that a guard expects from a library."""


@contextlib.contextmanager
def lines_run(fault=None):
    """Yield the lines of `failurelab` (file, number) that run inside a guard's `_check`, and those outside of it.

    Args:
        fault: the line that raises a Fault when it is first run inside.
    """
    inside, outside = {}, {}

    def on_call(frame, event, _):
        return on_line if frame.f_code.co_filename.startswith(HOUSE) else None

    def on_line(frame, event, _):
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


def _callers(frame):
    while frame := frame.f_back:
        yield frame.f_code


class LateScores(transformers.Trainer):
    """A trainer with a `compute_loss` of its own, which makes all rows of logits and scores by the wrong ones."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        """Return the mean negative log-probability of the last tokens, each by the row that has read it."""
        ids = inputs["input_ids"]
        rows = model(input_ids=ids).logits[:, -2:].log_softmax(-1)
        return -rows.gather(-1, ids[:, -2:, None]).mean()


def late_scores(model, tokenizer, kind=LateScores):
    """Return a trainer of sums that generates nothing."""
    ids = [tokenizer(f"{prompt}{answer}")["input_ids"] for prompt, answer in models.sums()]
    folder = tempfile.TemporaryDirectory()
    arguments = transformers.TrainingArguments(
        folder.name, max_steps=2, per_device_train_batch_size=4, save_strategy="no", report_to=[], disable_tqdm=True,
        remove_unused_columns=False, use_cpu=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids if len(row) == 6]
    trainer = kind(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.folder = folder  # removed with the trainer
    return trainer


def grpo(model, tokenizer, **options):
    """GRPO in which nothing is wrong, also in stacks whose trl asks for logits by a name that the model swallows."""
    if Version(importlib.metadata.version("trl")) < Version("1.15"):
        logits.repair(model)
    options = {"reward": alternate, "rows": models.rows().select(range(150, 166))} | options
    return trainers.grpo(model, tokenizer, steps=2, prompts_per_step=4, num_generations=2, **options)


def _cut_off(model, tokenizer):
    """Reentrant checkpointing and frozen embeddings, without the hook that transformers 5 sets along with it."""
    model.get_input_embeddings().requires_grad_(False)
    checkpoint(model, reentrant=True)
    return grpo(model, tokenizer)


def _partitioned(model, tokenizer):
    """Parameters and a hook that look like ZeRO-3's, and do nothing."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number

    def hook(*_): ...

    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model.model.register_forward_hook(hook)
    return grpo(model, tokenizer)


def _flat(model, tokenizer):
    return grpo(model, tokenizer, reward=lambda completions, **_: [0.0] * len(completions))


def _rounded(model, tokenizer):
    return grpo(model.to(torch.bfloat16), tokenizer, learning_rate=1e-6)


def _two_engines(model, tokenizer, **wrong):
    """A second engine, where trl can have one of one's own."""
    engine = Engine(model, tokenizer, **wrong)
    trainer = grpo(model, tokenizer)
    if hasattr(trainer, "rollout_func"):
        trainer.rollout_func = engine
    return trainer


def _other_temperature(model, tokenizer):
    """Tokens are drawn at a temperature at which they are not scored."""
    trainer = _two_engines(model, tokenizer, temperature=0.5)
    if not hasattr(trainer, "rollout_func"):
        trainer.generation_config.temperature = 0.5
    return trainer


# For each guard: how it is made, a run that it finds nothing wrong with, and one that it finds something in. In the
# first it is to stop what it finds, in the second to warn.
GUARDS = {
    "GradientGuard": (lambda trainer, action: guards.GradientGuard(action), (grpo, _cut_off)),
    "RolloutGuard": (
        lambda trainer, action: guards.RolloutGuard(action, prompts=["3+4=", "12+19="], max_new_tokens=2),
        (grpo, functools.partial(grpo, gradient_checkpointing=True)),
    ),
    "LogitsGuard": (lambda trainer, action: guards.LogitsGuard(action), (grpo, late_scores)),
    "Zero3Guard": (lambda trainer, action: guards.Zero3Guard(trainer, action), (grpo, _partitioned)),
    "PlacementGuard": (lambda trainer, action: guards.PlacementGuard(action), (grpo, late_scores)),
    "RewardGuard": (lambda trainer, action: guards.RewardGuard(trainer, action, groups=4), (grpo, _flat)),
    "UpdateGuard": (lambda trainer, action: guards.UpdateGuard(action, steps=2), (grpo, _rounded)),
    "EngineMismatchGuard": (
        lambda trainer, action: guards.EngineMismatchGuard(trainer, action),
        (_two_engines, _other_temperature),
    ),
}


def inject(name, every=1):
    """Inject a fault at each line that a guard of GUARDS runs for itself, or at every so many.

    Returns:
        How many faults there were; by line, what came of the runs that did not train to the weights of a run without a
        guard (one without a fault is among them), or did not say once that they could not check; and the source lines
        of `failurelab` that ran for the guard where no error is caught; those of `base`, which catches, and of
        `handles`, which hands on, are left out.
    """
    guard, runs = GUARDS[name]
    failures.all()  # read once in a process: a later run has none of these lines
    count, others, texts = 0, {}, {}
    for build, action in zip(runs, ("stop", "warn")):
        make = functools.partial(guard, action=action)
        weights, _, (_, repairs) = _train(build, None)
        trained, _, (inside, outside) = _train(build, make)
        if not all(torch.equal(*pair) for pair in zip(weights, trained)):
            others["no fault"] = "the guard changes the run"
        own = [line for line in outside if line not in repairs and not line[0].endswith(("base.py", "handles.py"))]
        texts |= {_source(line): None for line in own}
        for line in list(inside)[::every]:
            count += 1
            try:
                trained, messages, _ = _train(build, make, line)
            except Exception as error:
                others[line] = f"{type(error).__name__}: {error}"
                continue
            same = all(torch.equal(*pair) for pair in zip(weights, trained))
            if not same or sum("injected" in message or "Fault" in message for message in messages) != 1:
                others[line] = f"same weights: {same}; {messages}"
    return count, others, tuple(texts)


def _train(build, make, fault=None):
    """Return the weights after a run, the guard's messages, and the lines that were run."""
    model, tokenizer = copy.deepcopy(_loaded())
    with said() as messages, lines_run(fault) as run:
        transformers.set_seed(0)
        trainer = build(model, tokenizer)
        if make is not None:
            trainer.add_callback(make(trainer))
        run[0].clear(), run[1].clear()
        trainer.train()
    return [parameter.detach() for parameter in trainer.model.parameters()], messages, run


@functools.cache
def _loaded():
    return models.load("tiny")


def _source(line):
    path, number = line
    return pathlib.Path(path).read_text(encoding="utf-8").splitlines()[number - 1].strip()
