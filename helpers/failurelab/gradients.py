"""Gradients that are missing: which trainable parameters get none, and the repair for gradient checkpointing.

What goes wrong: with *reentrant* gradient checkpointing a checkpointed layer is one autograd function of its tensor
arguments. Where none of these requires a gradient (frozen embeddings, or LoRA on a frozen model), its output has no
graph, and every parameter inside it is cut off. What comes after the last layer still trains, so the loss moves and
nothing is raised; if nothing trainable comes after it, backward ends in "element 0 of tensors does not require grad and
does not have a grad_fn". torch's warning "None of the inputs have requires_grad=True. Gradients will be None" is no
diagnosis: every pass without gradients gives it too, generation above all, also after the repair. So measure:
`watch` around a backward pass, or around a training run.

Sources: torch.utils.checkpoint.check_backward_validity; https://github.com/huggingface/trl/issues/2671, fixed for GRPO
in https://github.com/huggingface/trl/pull/2848.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from failurelab._checkpointing import enable_checkpointing, option_name
from failurelab._inputs import GradientError, input_embeddings, require_input_grads
from failurelab._text import list_names
from failurelab.adapters import prepare_peft

__all__ = [
    "GradientError",
    "GradientReport",
    "GradientWatch",
    "Snapshot",
    "checkpointed",
    "enable_checkpointing",
    "input_embeddings",
    "not_optimized",
    "prepare_peft",
    "require_input_grads",
    "snapshot",
    "watch",
]


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """What a backward pass left on the trainable parameters: their names, in the model's order."""

    trainable: tuple[str, ...]
    without_gradient: tuple[str, ...]
    zero_gradient: tuple[str, ...]
    next_step: str = ""
    not_optimized: tuple[str, ...] = ()
    """Those that the optimizer does not hold; asked by GradientGuard alone."""

    @property
    def learns(self) -> bool:
        """True if something is trainable, all of it has a gradient, and no optimizer is known to leave it out.

        A gradient of all zeros is no fault: LoRA's A starts with one, and a batch in which every completion has the
        same reward gives nothing else.
        """
        return bool(self.trainable) and not (self.without_gradient or self.not_optimized)

    def __str__(self) -> str:
        total = len(self.trainable)
        text = f"all {total} trainable tensors have a gradient."
        if self.without_gradient:
            text = (
                f"{len(self.without_gradient)} of {total} trainable tensors have no gradient: "
                f"{list_names(self.without_gradient)}. The optimizer leaves them as they are, and raises nothing."
            )
        if self.zero_gradient:
            text += f" All zero in {len(self.zero_gradient)}: {list_names(self.zero_gradient)}."
        return f"{text} Next: {self.next_step}" if self.without_gradient and self.next_step else text


class GradientWatch:
    """Listens to every backward pass until `stop()`; `watch` returns one."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._parameters = _trainable(model)
        self._reached: set[str] = set()
        self._nonzero: set[str] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._record, name))
            for name, parameter in self._parameters.items()
        ]

    def _record(self, name: str, parameter: torch.Tensor) -> None:
        self._reached.add(name)
        if name not in self._nonzero and parameter.grad is not None and _has_nonzero(parameter.grad):
            self._nonzero.add(name)

    def report(self) -> GradientReport:
        """Return what has reached the parameters in all backward passes so far, also after a `zero_grad()`.

        Raises:
            GradientError: what was listened to was frozen since, as PEFT does with a model that it wraps.
        """
        if not any(parameter.requires_grad for parameter in self._parameters.values()):
            raise GradientError(
                f"none of the {len(self._parameters)} tensors that were listened to is trainable any more: the model "
                "was wrapped or frozen since. Next: gradients.watch(trainer.model), after the trainer is made."
            )
        return _report(self._model, self._parameters, self._reached, self._nonzero)

    def stop(self) -> None:
        """Stop listening; the report stays."""
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> "GradientWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def watch(model: nn.Module) -> GradientWatch:
    """Listen to the backward passes of a block.

    After `with gradients.watch(trainer.model) as watched: trainer.train()`, `watched.report()` is a `GradientReport`,
    although the trainer has set the gradients to None since.

    Raises:
        GradientError: nothing in the model is trainable.
    """
    return GradientWatch(model)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Copies of the trainable parameters, to see later which of them training has changed."""

    values: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.values)

    def changed(self, model: nn.Module) -> list[str]:
        """Return the names of the tensors that are no longer the same, bit for bit, in the model's order.

        Raises:
            GradientError: `model` lacks one of the tensors, so it is another model, or wrapped since.
        """
        current = dict(model.named_parameters())
        missing = [name for name in self.values if name not in current]
        if missing:
            raise GradientError(
                f"{len(missing)} tensors of the snapshot are not in this model, such as {missing[0]}: it is another "
                "one, or was wrapped since. Next: take the snapshot of trainer.model, after the trainer is made."
            )
        return [name for name, value in self.values.items() if not torch.equal(value, current[name].detach())]


def snapshot(model: nn.Module) -> Snapshot:
    """Copy the trainable parameters; `changed(model)` of the copy, after training, names those that moved.

    Raises:
        GradientError: nothing in the model is trainable.
    """
    return Snapshot({name: parameter.detach().clone() for name, parameter in _trainable(model).items()})


def not_optimized(model: nn.Module, optimizer: Any) -> tuple[str, ...]:
    """Return the names of trainable tensors that an optimizer does not hold, so that no step changes them.

    None is returned for an optimizer that holds tensors, but none of the model's, such as DeepSpeed's: it steps copies.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held and held.isdisjoint(map(id, model.parameters())):
        return ()
    return tuple(
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held
    )


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not trainable:
        raise GradientError(
            f"nothing is trainable in this {type(model).__name__}: all {len(parameters)} parameter tensors have "
            "requires_grad=False. Next: wrap it with an adapter (peft.get_peft_model), load the adapter that is there "
            "with PeftModel.from_pretrained(..., is_trainable=True), or set requires_grad_(True) on what is to learn."
        )
    return trainable


def _report(model: nn.Module, parameters: Iterable[str], reached: set[str], nonzero: set[str]) -> GradientReport:
    without = tuple(name for name in parameters if name not in reached)
    return GradientReport(
        trainable=tuple(parameters),
        without_gradient=without,
        zero_gradient=tuple(name for name in parameters if name in reached and name not in nonzero),
        next_step=_advice(model) if without else "",
    )


def _has_nonzero(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any())


def _advice(model: nn.Module) -> str:
    if any(kind == "reentrant" for kind, _ in checkpointed(model)):
        text = (
            "reentrant gradient checkpointing is on, and cuts layers off whose input needs no gradient: "
            "gradients.require_input_grads(model) or model.enable_input_require_grads() before training"
        )
        other = f"{option_name()}_kwargs={{'use_reentrant': False}}"
        trl = importlib.metadata.version("trl") if importlib.util.find_spec("trl") else "1"
        if Version("0.22") <= Version(trl) < Version("0.27"):
            # checkpointing comes back from each generation without its arguments; in 0.26 with OnlineDPOTrainer alone
            return f"{text}; {other} alone does not last, for trl {trl} loses it at the first generation."
        if Version(trl) < Version("0.22"):
            other += (
                f". If the trainer generates, rollouts.repair(model) too: trl {trl} leaves checkpointing on meanwhile, "
                "and rollouts may be garbage"
            )
        return f"{text}, or {other}."
    return "look whether the forward pass uses these parameters, and whether something detaches before them."


def checkpointed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have gradient checkpointing switched on, each with its kind.

    The kind is `reentrant`, `non-reentrant`, or `unknown` where the function was not made by transformers.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", None) or {}
            reentrant = keywords.get("use_reentrant")
            yield ("unknown" if reentrant is None else "reentrant" if reentrant else "non-reentrant"), module
