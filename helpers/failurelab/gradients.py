"""Gradients that are missing: which trainable parameters get none, and the repair for gradient checkpointing.

What goes wrong: with *reentrant* gradient checkpointing a checkpointed layer is one autograd function of its tensor
arguments. Where none of these requires a gradient (frozen embeddings, or LoRA on a frozen model), its output has no
graph, and every parameter inside it is cut off. What lies behind the last layer still trains, so the loss moves and
nothing is raised; where nothing lies there, backward ends in "element 0 of tensors does not require grad and does not
have a grad_fn". torch's warning "None of the inputs have requires_grad=True. Gradients will be None" is no diagnosis:
it comes from every pass without gradients too, generation above all, and stays after the repair. So measure:
`gradient_report` after one backward pass, or `watch` around a training run.

Sources: torch.utils.checkpoint.check_backward_validity; https://github.com/huggingface/trl/issues/2671, fixed for GRPO
in https://github.com/huggingface/trl/pull/2848.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from failurelab.handles import Handle

_NAMED = 3  # so many names are spelled out in a report's text


class GradientError(RuntimeError):
    """A question about gradients has no answer here; the message says what was found and the next step."""


# The repair


class _RequireGrad:
    """A forward hook: the module's output requires a gradient. It counts who asked for it."""

    def __init__(self) -> None:
        self.holders = 0

    def __call__(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        # in a pass without gradients there is nothing to carry on, and inference tensors must stay as they are
        if torch.is_grad_enabled():
            output.requires_grad_(True)

    def __deepcopy__(self, memo: dict) -> "_RequireGrad":
        return _RequireGrad()  # a copied model, such as a reference model, has the hook and nobody who holds it


def require_input_grads(model: nn.Module) -> Handle:
    """Make the output of the input embeddings require a gradient, so that reentrant checkpointing keeps the graph.

    For plain, PEFT and quantized models, before or after they are wrapped. Idempotent: called again, on the model or on
    its PEFT wrapper, no second hook is made; the hook goes with the last handle. The hooks that transformers and trl
    set for the same purpose (`enable_input_require_grads`) are left alone, and leave this one alone.

    Args:
        model: a transformers model, or a wrapper that passes `get_input_embeddings` on.

    Returns:
        A handle; `remove()` takes the repair back.

    Raises:
        GradientError: the model has no input embeddings to hook.
    """
    embeddings = input_embeddings(model)
    for hook in embeddings._forward_hooks.values():
        if isinstance(hook, _RequireGrad):
            break
    else:
        hook = _RequireGrad()
        embeddings.register_forward_hook(hook)
    hook.holders += 1

    def undo() -> None:
        hook.holders -= 1
        if not hook.holders:
            for key in [key for key, other in embeddings._forward_hooks.items() if other is hook]:
                del embeddings._forward_hooks[key]

    return Handle("input embeddings require a gradient", undo)


def input_embeddings(model: nn.Module) -> nn.Module:
    """Return the module whose output is to require a gradient, looking through wrappers.

    Raises:
        GradientError: the model has none.
    """
    while not hasattr(model, "get_input_embeddings") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # DistributedDataParallel, a DeepSpeed engine
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        found = None
    if not isinstance(found, nn.Module):
        raise GradientError(
            f"{type(model).__name__} has no input embeddings (get_input_embeddings), so there is no output to make "
            "require a gradient. Next: hand over the transformers model itself, or use gradient_checkpointing_kwargs="
            "{'use_reentrant': False}, which needs no hook."
        )
    return found


def prepare_peft(
    model: nn.Module, peft_config: Any, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> Any:
    """Return the model wrapped for training an adapter, whatever it was before, with every gradient in place.

    In this order: adapters that are there are merged and unloaded (so the function stays the same; adapters that are
    switched off are dropped); a 4- or 8-bit model is prepared for training; checkpointing is switched on if asked for;
    the input embeddings are hooked (`require_input_grads`); the new adapter is put on. A trainer that switches
    checkpointing on later, reentrant or not, finds the hook there.

    The model is changed in place; hand the result over to the trainer, without a `peft_config`.

    Args:
        model: a transformers model, plain or 4-bit, or a PeftModel.
        peft_config: of the new adapter; it is copied.
        gradient_checkpointing_kwargs: such as `{"use_reentrant": False}`, or `{}`; None leaves checkpointing as it is.

    Raises:
        AdapterError: target modules that match nothing, a model wrapped twice, a model whose training has begun,
            adapters of different base models, and whatever else PEFT refuses; the model is as it was.
        GradientError: the model has no input embeddings.
    """
    from failurelab import adapters

    return adapters.prepare(model, peft_config, gradient_checkpointing_kwargs)


# The measurement


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """What a backward pass left on the trainable parameters: their names, in the model's order."""

    trainable: tuple[str, ...]
    without_gradient: tuple[str, ...]
    zero_gradient: tuple[str, ...]
    next_step: str = ""

    @property
    def learns(self) -> bool:
        """True if no trainable parameter is without a gradient.

        A gradient of all zeros is not held against a parameter: LoRA's A starts so, and so does a batch in which every
        completion has the same reward.
        """
        return not self.without_gradient

    def __str__(self) -> str:
        total = len(self.trainable)
        if self.without_gradient:
            text = (
                f"{len(self.without_gradient)} of {total} trainable tensors have no gradient: "
                f"{_listed(self.without_gradient)}. The optimizer leaves them as they are, and raises nothing."
            )
        else:
            text = f"all {total} trainable tensors have a gradient."
        if self.zero_gradient:
            text += f" All zero in {len(self.zero_gradient)}: {_listed(self.zero_gradient)}."
        return f"{text} Next: {self.next_step}" if self.without_gradient and self.next_step else text


def gradient_report(model: nn.Module) -> GradientReport:
    """Say which trainable parameters have a gradient, after a backward pass and before `zero_grad()`.

    Args:
        model: any module; wrappers such as PEFT's and DistributedDataParallel are fine.

    Raises:
        GradientError: nothing is trainable; no trainable parameter has a gradient, as before any backward pass; or
            DeepSpeed ZeRO-3 holds the parameters, whose `.grad` is always empty.
    """
    parameters = _trainable(model)
    if any(hasattr(parameter, "ds_id") for parameter in parameters.values()):
        raise GradientError(
            "DeepSpeed ZeRO-3 has partitioned these parameters: their .grad is always None, so a report of it would "
            "blame healthy ones. Next: `with gradients.watch(model) as watched:` around a step; it listens to the "
            "backward pass itself."
        )
    if all(parameter.grad is None for parameter in parameters.values()):
        raise GradientError(
            f"none of the {len(parameters)} trainable tensors has a gradient: no backward pass has run yet, "
            "zero_grad() has run since, or the backward pass reached none of them. Next: loss.backward(), then "
            "gradient_report(model) before optimizer.zero_grad(); inside a trainer, gradients.watch(model)."
        )
    return _report(
        model,
        parameters,
        {name for name, parameter in parameters.items() if parameter.grad is not None},
        {name for name, parameter in parameters.items() if parameter.grad is not None and _any(parameter.grad)},
    )


class GradientWatch:
    """Listens to every backward pass until `stop()`; made by `watch`."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._parameters = _trainable(model)
        self._reached: set[str] = set()
        self._nonzero: set[str] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name))
            for name, parameter in self._parameters.items()
        ]

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        self._reached.add(name)
        if name not in self._nonzero and parameter.grad is not None and _any(parameter.grad):
            self._nonzero.add(name)

    @property
    def heard(self) -> bool:
        """True once a gradient has reached any trainable parameter."""
        return bool(self._reached)

    def report(self) -> GradientReport:
        """Return what reached the parameters in all backward passes so far, whatever `zero_grad` did since."""
        return _report(self._model, self._parameters, self._reached, self._nonzero)

    def stop(self) -> None:
        """Listen no longer; the report stays."""
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> "GradientWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def watch(model: nn.Module) -> GradientWatch:
    """Listen to the backward passes of a block.

    After `with gradients.watch(trainer.model) as watched: trainer.train()`, `watched.report()` is a `GradientReport`,
    also where a trainer has set the gradients to None since. Unlike `gradient_report` it may say that nothing at all
    got a gradient.

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
        """Return the names of the tensors that differ by now, bit for bit, in the model's order.

        Raises:
            GradientError: `model` lacks one of the tensors, so it is another model, or wrapped since.
        """
        now = dict(model.named_parameters())
        missing = [name for name in self.values if name not in now]
        if missing:
            raise GradientError(
                f"{len(missing)} tensors of the snapshot are not in this model, such as {missing[0]}: it is another "
                "one, or was wrapped since. Next: take the snapshot of trainer.model, after the trainer is made."
            )
        return [name for name, value in self.values.items() if not torch.equal(value, now[name].detach())]


def snapshot(model: nn.Module) -> Snapshot:
    """Copy the trainable parameters; `snapshot(model).changed(model)` after training names those that moved.

    Raises:
        GradientError: nothing in the model is trainable.
    """
    return Snapshot({name: parameter.detach().clone() for name, parameter in _trainable(model).items()})


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    everything = dict(model.named_parameters())
    parameters = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
    if not parameters:
        raise GradientError(
            f"nothing is trainable in this {type(model).__name__}: all {len(everything)} parameter tensors have "
            "requires_grad=False. Next: wrap it with an adapter (peft.get_peft_model), activate the adapter that is "
            "there, or set requires_grad_(True) on what is to learn."
        )
    return parameters


def _report(model: nn.Module, parameters: Iterable[str], reached: set[str], nonzero: set[str]) -> GradientReport:
    without = tuple(name for name in parameters if name not in reached)
    return GradientReport(
        trainable=tuple(parameters),
        without_gradient=without,
        zero_gradient=tuple(name for name in parameters if name in reached and name not in nonzero),
        next_step=_advice(model) if without else "",
    )


def _any(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any())


def _advice(model: nn.Module) -> str:
    kinds = {kind for kind, _ in checkpointed(model)}
    if "reentrant" in kinds:
        return (
            "reentrant gradient checkpointing is on, and cuts layers off whose input needs no gradient: "
            "gradients.require_input_grads(model) before training, or gradient_checkpointing_kwargs="
            "{'use_reentrant': False}."
        )
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


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
