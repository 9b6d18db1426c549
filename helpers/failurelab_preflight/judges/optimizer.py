"""F23: trainable tensors that the optimizer does not hold, so that no step changes the model.

Upstream: the registry's F23.
"""

from collections.abc import Iterator
from typing import Any

from failurelab import gradients, plants
from failurelab._unwrap import has_adapter
from failurelab_preflight.finding import Finding, Quantity
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.repairs import Keyword
from failurelab_preflight.training import Training


def judge_optimizer(training: Training) -> Iterator[Finding]:
    """Compare the tensors that are trained with those that the optimizer holds, after training."""
    model, optimizer = training.trainer.model, getattr(training.trainer, "optimizer", None)
    if optimizer is None:
        yield Finding.not_checked("F23", "training ended before there was an optimizer")
        return
    kept = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = list(model.named_parameters()) if has_adapter(model) else []
    adapters = [id(parameter) for name, parameter in named if is_adapter(name, model)]  # none of a learned prompt
    wanted = adapters or [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    count, what = len(kept.intersection(wanted)), "tensors of the adapters" if adapters else "trainable tensors"
    evidence = f"the optimizer holds {count} of {len(wanted)} {what}"
    figures = (Quantity("tensors that the optimizer holds", count, "tensors", len(wanted)),)
    left = sum(parameter.requires_grad and id(parameter) not in kept for parameter in model.parameters())
    measured = {"tensors_total": len(named) or len(wanted), "tensors_trainable": count, "tensors_not_optimized": left}
    controls = {
        "an empty optimizer": plants.empty_optimizer(model),
        "a tensor taken out of the optimizer": plants.taken_out(model, optimizer),
    }
    if settled := settle("F23", [measured], controls, evidence, figures=figures):
        yield settled
        return
    if count:
        matrices = sum(each.ndim > 1 and each.requires_grad and id(each) in kept for each in model.parameters())
        why = f"{evidence}, {matrices} of them matrices; {left} that require a gradient are in none of its groups"
        yield Finding.not_checked("F23", f"{why}: a script may train the others alone", figures=figures)
        return
    if gradients.steps_copies(model, optimizer):
        why = f"{evidence}, and others, which {type(optimizer).__name__} may write back into the model"
        yield Finding.not_checked("F23", why, figures=figures)
        return
    evidence += ": no step changes the model"
    if adapters and not any(tensor.requires_grad for tensor in model.parameters() if id(tensor) in adapters):
        off = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
        evidence += f"; they are {'switched off (disable_adapter_layers)' if off else 'frozen (inference_mode, say)'}"
    repair = "Make the optimizer of the parameters that the trainer's model has when training begins."
    undo = Keyword("trainer", "optimizers") if "optimizers" in training.keywords else None
    if training.adapters and not training.adapters[-1].trainable:
        evidence += f"; {training.adapters[-1].name} was loaded without is_trainable=True"
        repair = "PeftModel.from_pretrained(model, adapter, is_trainable=True)"
        undo = Keyword("adapter", "is_trainable", "True")
    yield Finding("F23", evidence, repair, undo=undo, figures=figures)


def is_adapter(name: str, model: Any) -> bool:
    """Whether a tensor is of the adapter in use: a low-rank matrix, or a module that is trained as a whole."""
    active = getattr(model, "active_adapter", None)
    return ("lora_" in name or "modules_to_save" in name) and (
        not isinstance(active, str) or f".{active}" in name or "lora_" not in name
    )
