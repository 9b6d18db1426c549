"""The kind `zero3`: a script whose trainer runs under a real ZeRO-3 engine, in one process.

The checker sets up what a launcher would, calls `build_trainer(model_path, output_dir)`, trains, and looks at every
generation by the trainer's model, whoever asks for it: how many of ZeRO-3's hooks are on, and how many tensors are
partitioned when a forward pass begins. Those are gathered anew, for each token: the cost of a wrong hand-over, counted
and not timed. At the end the parameters are gathered and compared with those before.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from failurelab import handles, zero3
from failurelab_course.experiments import deepspeed
from failurelab_course.labs.checker.base import CheckRun
from failurelab_course.labs.checker.kinds.trainer import build_trainer, must_be_as_given

STAGE = 3


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Build the script's trainer under ZeRO-3, train it, and fill in `run.metrics`.

    Raises:
        Refused: another trainer, or another model.
        EngineError: no engine can be made on this machine.
    """
    metrics = run.metrics
    with deepspeed.one_process(STAGE):
        run.stage = "build"
        trainer = build_trainer(script, run)
        with zero3.generation_model(trainer) as model:
            must_be_as_given(model, run)
        run.stage = "train"
        metrics |= dict.fromkeys(
            ["steps_done", "generations", "zero3_hooks_in_generation", "partitioned_in_generation", "evaluated_first"],
            0,
        )
        trainer.add_callback(_Count(metrics, trainer))
        with _watched(trainer, metrics):
            trainer.train()
        run.stage = "measure"
        with zero3.generation_model(trainer) as model:
            now = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        names = [name for name, _ in trainer.model.named_parameters()]
        metrics["tensors_total"] = len(names)
        metrics["tensors_changed"] = sum(not torch.equal(now[name], run.start[name]) for name in names)
        metrics["finite"] = all(bool(tensor.isfinite().all()) for tensor in now.values())


class _Count(transformers.TrainerCallback):
    """Counts optimizer steps, and ZeRO-3's hooks when training begins."""

    def __init__(self, metrics: dict[str, Any], trainer: Any):
        self.metrics, self.trainer = metrics, trainer

    def on_train_begin(self, args, state, control, **_):
        self.metrics["zero3_hooks"] = zero3.hooks(self.trainer.model)
        engine = zero3.engine_of(self.trainer)
        self.metrics["zero_stage"] = engine.zero_optimization_stage() if engine is not None else -1

    def on_step_end(self, args, state, control, **_):
        self.metrics["steps_done"] = state.global_step


@contextlib.contextmanager
def _watched(trainer: Any, metrics: dict[str, Any]) -> Iterator[None]:
    """Look at the model whenever it generates, and at each forward pass in there; count evaluations."""
    model, generating = trainer.model, []

    def count_hooks() -> None:
        metrics["zero3_hooks_in_generation"] = max(metrics["zero3_hooks_in_generation"], zero3.hooks(model))

    def generate(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        metrics["generations"] += 1
        count_hooks()
        generating.append(True)
        try:
            return method(*args, **kwargs)
        finally:
            generating.pop()

    def before_forward(*_: Any) -> None:
        if generating:
            absent = sum(parameter.ds_status.name != "AVAILABLE" for parameter in zero3.partitioned(model))
            metrics["partitioned_in_generation"] = max(metrics["partitioned_in_generation"], absent)
            count_hooks()

    def evaluate(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        figures = method(*args, **kwargs)
        metrics["evaluated_first"] += metrics["steps_done"] == 0
        return figures

    hook = model.register_forward_pre_hook(before_forward)
    try:
        with (
            handles.wrap_method(model, "generate", generate, "the checker's look at generation"),
            handles.wrap_method(trainer, "evaluate", evaluate, "the checker's count of evaluations"),
        ):
            yield
    finally:
        hook.remove()
        metrics["zero3_hooks_after"] = zero3.hooks(model)
        trained = metrics["steps_done"] > 0 and metrics["generations"] > 0
        metrics["generates_without_hooks"] = trained and metrics["zero3_hooks_in_generation"] == 0
