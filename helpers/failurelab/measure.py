"""What a lab's run really does, measured from outside: gradients, changed weights, rollouts, accuracy.

A script that prints "fixed" has repaired nothing, and a warning that is gone is no gradient. So the checker imports
the script, calls its `build_trainer(model_path, output_dir)`, trains, and measures by itself: gradients between the
backward pass and the optimizer step, the completions that the trainer generates (scored here, whatever the script's own
reward function says), and the accuracy of the trained weights in a clean copy of the model.

It runs in the era's Python, in a process of its own (see `check_server`).
"""

import contextlib
import dataclasses
import errno
import importlib.util
import os
import pathlib
import re
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from . import models
from .figures import FIGURES

WARNING = "None of the inputs have requires_grad=True"
DRAWS = 4
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


@dataclasses.dataclass
class Measured:
    """What came of one run.

    Attributes:
        figures: every name of `figures.FIGURES`; None where the run ended before.
        refused: why this is no answer to the lab at all (another trainer, another model), or empty.
        environment: why the question could not be asked (the stack does not import, no space), or empty.
        traceback: of the error, or empty.
    """

    figures: dict[str, Any]
    refused: str = ""
    environment: str = ""
    traceback: str = ""


# Of one completion: the step it was generated for, its prompt, and 1.0 if it is right, else 0.0
Score = tuple[int, str, float]


class Refused(Exception):
    """What the script hands over cannot be measured as an answer to the lab."""


def run(script: pathlib.Path, model_path: pathlib.Path, output_dir: pathlib.Path, trainer_class: str) -> Measured:
    """Import `script`, build its trainer, train and measure; no error of the script leaves this function.

    Args:
        script: defines `build_trainer(model_path, output_dir)`.
        model_path: the model that the script is given, and that accuracy before training is measured on.
        output_dir: for the trainer.
        trainer_class: name of the class of trl or transformers that the trainer must be an instance of.
    """
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    figures |= {"error": "", "error_stage": "", "warnings": 0}
    made = Measured(figures)
    try:
        clean, tokenizer = models.load(str(model_path))
    except models.ModelError as error:
        made.environment = str(error)
        return made
    start = {name: tensor.clone() for name, tensor in clean.state_dict().items()}
    transformers.set_seed(0)
    stage = "import"
    with _count_shown(figures):
        try:
            module = _imported(script)
            stage = "build"
            trainer = _built(module, model_path, output_dir, trainer_class, start)
            stage = "train"
            _train(trainer, clean, tokenizer, figures)
            stage = "measure"
            _after(trainer, clean, tokenizer, figures)
        except Refused as error:
            made.refused = str(error)
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a script are its outcome too
            figures["error"] = f"{type(error).__name__}: {_first_line(error)}"
            figures["error_stage"] = stage
            made.environment = _environment(error, script)
            made.traceback = "".join(traceback.format_exception(error))
    return made


def _imported(script: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("lab_script", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _built(
    module: types.ModuleType,
    model_path: pathlib.Path,
    output_dir: pathlib.Path,
    trainer_class: str,
    start: dict[str, torch.Tensor],
) -> transformers.Trainer:
    if not callable(getattr(module, "build_trainer", None)):
        raise Refused("the script defines no function build_trainer(model_path, output_dir)")
    trainer = module.build_trainer(str(model_path), str(output_dir))
    names = [each.__name__ for each in type(trainer).__mro__]
    if not isinstance(trainer, transformers.Trainer) or trainer_class not in names:
        raise Refused(f"build_trainer returned a {type(trainer).__name__}, the lab is about {trainer_class}")
    if trainer.state.global_step:
        raise Refused(f"the trainer has done {trainer.state.global_step} steps before it was handed over")
    inner = _unwrapped(trainer.model)
    found = {name: tensor for name, tensor in inner.state_dict().items() if name in start}
    # Adapters rename the layers that they wrap; those that kept their name must be as given.
    if not found or any(
        found[name].shape != start[name].shape or not torch.equal(found[name].float().cpu(), start[name])
        for name in found
    ):
        raise Refused("the trainer's model is not the one in model_path: its weights differ before training")
    return trainer


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _Watch(transformers.TrainerCallback):
    """Looks at gradients when they are there, between the backward pass and the optimizer step."""

    def __init__(self, figures: dict[str, Any]):
        self.figures = figures

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        figures = self.figures
        figures["tensors_trainable"] = len(trainable)
        figures["tensors_frozen"] = figures["tensors_total"] - len(trainable)
        without = sum(parameter.grad is None for parameter in trainable)
        figures["tensors_without_gradient"] = max(without, figures["tensors_without_gradient"] or 0)
        if state.global_step in (0, state.max_steps - 1):
            figures["tensors_zero_gradient"] = sum(
                parameter.grad is not None and not parameter.grad.any() for parameter in trainable
            )
            figures["checkpointing"] = bool(getattr(_unwrapped(model), "is_gradient_checkpointing", False))

    def on_step_end(self, args, state, control, optimizer=None, **_):
        figures = self.figures
        figures["steps_done"] = state.global_step
        optimizer = getattr(optimizer, "optimizer", optimizer)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        figures["learning_rate"] = max([*rates, figures["learning_rate"] or 0.0])


def _train(trainer: transformers.Trainer, clean: Any, tokenizer: Any, figures: dict[str, Any]) -> None:
    figures["accuracy_before"] = _accuracy(clean, tokenizer)
    model = trainer.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    figures |= {
        "tensors_total": len(before),
        "tensors_trainable": len(trainable),
        "tensors_frozen": len(before) - len(trainable),
        "steps_done": 0,
        "learning_rate": 0.0,
    }
    trainer.add_callback(_Watch(figures))
    scores: list[Score] = []
    with _scored_rollouts(trainer, tokenizer, scores):
        try:
            trainer.train()
        finally:
            changed = [name for name, now in model.named_parameters() if name in before and _differ(before[name], now)]
            figures["tensors_changed"] = sum(name in trainable for name in changed)
            figures["frozen_changed"] = len(changed) - figures["tensors_changed"]
            _score(scores, clean, tokenizer, figures)
            losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
            weights = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
            figures["finite"] = weights and all(loss - loss == 0 for loss in map(float, losses))


def _differ(before: torch.Tensor, now: torch.Tensor) -> bool:
    return not torch.equal(before, now.detach())


@contextlib.contextmanager
def _scored_rollouts(trainer: Any, tokenizer: Any, scores: list[Score]) -> Iterator[None]:
    """Score every completion that the trainer's model generates.

    It stands on `generate` of the model itself, below the trainer, so that it sees what is trained on, in any trainer.
    """
    model = trainer.model
    original = model.generate
    answers = dict(models.sums())

    def generate(*args, **kwargs):
        out = original(*args, **kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        sequences = getattr(out, "sequences", out)
        prompts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        completions = tokenizer.batch_decode(sequences[:, ids.shape[1] :], skip_special_tokens=True)
        each = len(completions) // len(prompts)
        for index, completion in enumerate(completions):
            asked = re.search(r"\d+\+\d+=", prompts[index // each])
            if asked and asked[0] in answers:
                score = models.reward([completion], [answers[asked[0]]])[0]
                scores.append((trainer.state.global_step, asked[0], score))
        return out

    was_replaced = "generate" in vars(model)  # by the script, as a repair for instance
    model.generate = generate
    try:
        yield
    finally:
        del model.generate
        if was_replaced:
            model.generate = original


def _score(scores: list[Score], clean: Any, tokenizer: Any, figures: dict[str, Any]) -> None:
    """Work out the rewards at the start and at the end, and how far the first rollouts are below the model."""
    figures["rollouts"] = len(scores)
    if not scores:
        return
    steps = max(step for step, _, _ in scores) + 1
    first = [score for score in scores if score[0] < max(1, steps // 10)]
    last = [score for score in scores if score[0] >= steps - max(1, steps // 4)]
    figures["reward_first"] = sum(score for _, _, score in first) / len(first)
    figures["reward_last"] = sum(score for _, _, score in last) / len(last)
    # On the very prompts of these rollouts: some sums are easier than others.
    answers = dict(models.sums())
    prompts = [(prompt, answers[prompt]) for _, prompt, _ in first]
    figures["accuracy_there"] = models.accuracy(clean, tokenizer, sampled=True, prompts=prompts)
    figures["rollout_gap"] = figures["accuracy_there"] - figures["reward_first"]


def _after(trainer: transformers.Trainer, clean: Any, tokenizer: Any, figures: dict[str, Any]) -> None:
    """Measure the trained weights in a clean copy, so that hooks, patches and modes of the trained one do not count."""
    trained = trainer.model
    if hasattr(trained, "get_base_model"):
        folder = pathlib.Path(trainer.args.output_dir) / "measured-adapter"
        trained.save_pretrained(folder)
        from peft import PeftModel

        clean = PeftModel.from_pretrained(clean, folder)
    else:
        missing = clean.load_state_dict(trained.state_dict(), strict=False).missing_keys
        if missing:
            raise Refused(f"the trained model is another than the one in model_path: it has no {missing[0]}")
    figures["accuracy_after"] = _accuracy(clean, tokenizer)
    figures["accuracy_gain"] = figures["accuracy_after"] - figures["accuracy_before"]


def _accuracy(model: Any, tokenizer: Any) -> float:
    draws = [models.accuracy(model, tokenizer, sampled=True, seed=seed) for seed in range(DRAWS)]
    return sum(draws) / DRAWS


@contextlib.contextmanager
def _count_shown(figures: dict[str, Any]) -> Iterator[None]:
    """Count the warnings that a user would see: the script's own filters, set in the block, take effect."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            figures["warnings"] = sum(bool(re.search(WARNING, str(warning.message))) for warning in caught)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else ""


def _environment(error: BaseException, script: pathlib.Path) -> str:
    """Return why an error is the machine's or the stack's fault and not the script's, or an empty text."""
    if isinstance(error, MemoryError):
        return "this machine has not enough memory for the run"
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return f"this machine has no room for the run: {os.strerror(error.errno)}"
    if isinstance(error, ImportError):
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        frames = [name for name in frames if not name.startswith("<frozen")]
        if frames and pathlib.Path(frames[-1]).resolve() != pathlib.Path(script).resolve():
            return f"the library stack does not import: {_first_line(error)}"
    return ""
