"""The kind `loop`: a script whose `train(model, tokenizer, steps)` is a training loop written by hand.

The checker loads the model and hands it over, so it can look at it at every optimizer step: torch calls a hook before
each step of every optimizer of the process. Gradients are read there, and whatever the loop prints or returns is not
asked for. The trained weights are scored by the judge.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from failurelab_course.experiments import models
from failurelab_course.labs.checker.base import Refused, Run
from failurelab_course.labs.checker.kinds.trainer import Kept, Score, score, scored_rollouts

STEPS = 50


def measure(script: types.ModuleType, run: Run) -> None:
    """Run the script's training loop for `STEPS` steps, and fill in `run.metrics`.

    Raises:
        Refused: there is no such function, or the model came back as another, or on another device.
    """
    metrics = run.metrics
    train = run.function(script, "train(model, tokenizer, steps)")
    model, tokenizer = models.load(str(run.model_path), device=run.device)
    run.stage = "train"
    scores: list[Score] = []
    with _watched(model, metrics), scored_rollouts(model, tokenizer, scores, lambda: metrics["steps_done"]):
        try:
            train(model, tokenizer, run.stop_after or STEPS)
        finally:
            score(scores, run, STEPS)
    run.stage = "measure"
    trainable = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    now = {name: tensor.detach() for name, tensor in model.named_parameters()}
    if set(now) - set(run.start):
        raise Refused(f"the model came back as another: it has {sorted(set(now) - set(run.start))[0]}")
    run.must_be_there("the trained model", now.values())
    changed = {name for name, tensor in now.items() if not torch.equal(tensor.cpu(), run.start[name])}
    embeddings = model.get_input_embeddings().weight
    metrics |= {
        "tensors_total": len(now),
        "tensors_trainable": len(trainable),
        "tensors_frozen": len(now) - len(trainable),
        "tensors_changed": len(changed & set(trainable)),
        "frozen_changed": len(changed - set(trainable)),
        "embeddings_changed": any(now[name].data_ptr() == embeddings.data_ptr() for name in changed),
        "finite": all(bool(tensor.isfinite().all()) for tensor in now.values()),
        "accuracy_after": run.accuracy_of(model.state_dict()),
    }
    metrics["accuracy_gain"] = metrics["accuracy_after"] - metrics["accuracy_before"]


@contextmanager
def _watched(model: torch.nn.Module, metrics: dict[str, Any]) -> Iterator[None]:
    """Look at the model's gradients before each step of any optimizer that holds its parameters."""
    metrics |= {"steps_done": 0, "learning_rate": 0.0, "tensors_without_gradient": 0, "checkpointing": True}
    own = {id(parameter) for parameter in model.parameters()}
    kept = Kept(model)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = [group for group in optimizer.param_groups if own & {id(parameter) for parameter in group["params"]}]
        if not groups:
            return
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        without = sum(parameter.grad is None for parameter in trainable)
        metrics["steps_done"] += 1
        metrics["learning_rate"] = max(metrics["learning_rate"], *(float(group["lr"]) for group in groups))
        metrics["tensors_without_gradient"] = max(metrics["tensors_without_gradient"], without)
        metrics["tensors_zero_gradient"] = sum(
            parameter.grad is not None and not parameter.grad.any() for parameter in trainable
        )
        metrics["checkpointing"] &= not kept.count()

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()
        kept.remove()
        metrics["checkpointing"] &= metrics["steps_done"] > 0
