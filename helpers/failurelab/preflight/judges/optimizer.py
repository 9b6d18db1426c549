"""F23: trainable tensors that the optimizer does not hold, so that no step changes the model.

Upstream: the registry's F23.
"""

from collections.abc import Iterator
from typing import Any

from failurelab._unwrap import has_adapter
from failurelab.preflight.answer import Finding, Quantity
from failurelab.preflight.repairs import Keyword
from failurelab.preflight.training import Training


def judge_optimizer(training: Training) -> Iterator[Finding]:
    """Compare the tensors that are trained with those that the optimizer holds, after training."""
    model, optimizer = training.trainer.model, getattr(training.trainer, "optimizer", None)
    if optimizer is None:
        yield Finding.not_checked("F23", "training ended before there was an optimizer")
        return
    groups = [{id(parameter) for parameter in group["params"]} for group in optimizer.param_groups]
    kept = set().union(*groups)
    named = list(model.named_parameters()) if has_adapter(model) else []
    adapters = [id(parameter) for name, parameter in named if _is_adapter(name, model)]  # none of a learned prompt
    wanted = adapters or [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    count, what = len(kept.intersection(wanted)), "tensors of the adapters" if adapters else "trainable tensors"
    evidence = f"the optimizer holds {count} of {len(wanted)} {what}"
    figures = (Quantity("tensors that the optimizer holds", count, "tensors", len(wanted)),)
    if count:
        largest = max(groups, key=len)
        fewer = len(kept.difference(largest).intersection(wanted))
        yield Finding.held("F23", evidence, f"without its largest group it would hold {fewer}", figures=figures)
        return
    evidence += ": no step changes the model"
    repair = "Make the optimizer of the parameters that the trainer's model has when training begins."
    undo = Keyword("trainer", "optimizers") if "optimizers" in training.keywords else None
    if training.adapters and not training.adapters[-1].trainable:
        evidence += f"; {training.adapters[-1].name} was loaded without is_trainable=True"
        repair = "PeftModel.from_pretrained(model, adapter, is_trainable=True)"
        undo = Keyword("adapter", "is_trainable", "True")
    yield Finding("F23", evidence, repair, undo=undo, figures=figures)


def _is_adapter(name: str, model: Any) -> bool:
    """Whether a tensor is of the adapter in use: a low-rank matrix, or a module that is trained as a whole."""
    active = getattr(model, "active_adapter", None)
    return ("lora_" in name or "modules_to_save" in name) and (
        not isinstance(active, str) or f".{active}" in name or "lora_" not in name
    )
