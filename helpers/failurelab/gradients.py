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
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from failurelab._checkpointing import enable_checkpointing, option_name
from failurelab._inputs import GradientError, input_embeddings, require_input_grads
from failurelab._text import list_names
from failurelab._unwrap import has_adapter
from failurelab.adapters import prepare_peft
from failurelab.failures.predicates import Value
from failurelab.handles import keep_random_state, unseen

__all__ = [
    "GradientError",
    "GradientReport",
    "GradientWatch",
    "Snapshot",
    "checkpointed",
    "count",
    "enable_checkpointing",
    "find_unused",
    "input_embeddings",
    "not_optimized",
    "prepare_peft",
    "require_input_grads",
    "snapshot",
    "watch",
]


_PLANTED = "a module cut off from the loss"


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """What a backward pass left on the trainable parameters: their names, in the model's order."""

    trainable: tuple[str, ...]
    without_gradient: tuple[str, ...]
    zero_gradient: tuple[str, ...]
    next_step: str = ""
    not_optimized: tuple[str, ...] = ()
    """Those that the optimizer does not hold; asked by GradientGuard alone."""
    unused: tuple[str, ...] = ()
    """Those without a gradient that no forward pass used, so that none is missing; asked by GradientGuard alone."""

    @property
    def learns(self) -> bool:
        """True if something is trainable, all of it that is used has a gradient, and no optimizer leaves it out.

        A gradient of all zeros is no fault: LoRA's A starts with one, and a batch in which every completion has the
        same reward gives nothing else.
        """
        return bool(self.trainable) and not (self.without_gradient or self.not_optimized)

    def __str__(self) -> str:
        total = len(self.trainable)
        text = f"all {total} trainable tensors have a gradient."
        if self.unused:
            text = (
                f"all {total - len(self.unused)} trainable tensors that the forward passes used have a gradient. "
                f"{len(self.unused)} were not used, and have none: {list_names(self.unused)}."
            )
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
        self._cut_off = nn.Parameter(torch.zeros(1))  # planted: it is listened to as all are, and no loss reaches it
        self._reached: set[str] = set()
        self._nonzero: set[str] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._record, name))
            for name, parameter in {**self._parameters, _PLANTED: self._cut_off}.items()
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

    def planted(self) -> dict[str, Value]:
        """Return what the same watch says with one tensor more, which is cut off from the loss."""
        names = (*self._parameters, _PLANTED)
        return {"tensors_without_gradient": sum(name not in self._reached for name in names)}

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


def count(model: nn.Module, optimizer: Any = None) -> dict[str, Value]:
    """Return figures of a model's tensors: of adapters, trained ones, and such as no optimizer holds.

    Without an optimizer what it would hold is not known, and not counted.
    """
    named = list(model.named_parameters())
    trainable = sum(parameter.requires_grad for _, parameter in named)
    figures: dict[str, Value] = {
        "tensors_total": len(named),
        "tensors_trainable": trainable,
        "adapter_tensors": sum("lora_" in name for name, _ in named) or int(has_adapter(model)),
    }
    if optimizer is not None:
        left_out = len(not_optimized(model, optimizer))
        figures |= {"tensors_trainable": trainable - left_out, "tensors_not_optimized": left_out}
    return figures


def not_optimized(model: nn.Module, optimizer: Any) -> tuple[str, ...]:
    """Return the names of trainable tensors that an optimizer does not hold, and that it may have no copies of."""
    if steps_copies(model, optimizer):
        return ()
    held = _held(optimizer)
    return tuple(
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held
    )


def steps_copies(model: nn.Module, optimizer: Any) -> bool:
    """Return whether an optimizer holds tensors, none of the model's, and may write these back, as DeepSpeed's does.

    One of torch's own steps what it holds, of another model.
    """
    inner = optimizer.optimizer if type(optimizer).__module__.startswith("accelerate.") else optimizer
    held, theirs = _held(optimizer), type(inner).__module__.startswith("torch.")
    return bool(held) and held.isdisjoint(map(id, model.parameters())) and not theirs


def _held(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@dataclasses.dataclass
class ForwardPass:
    """A forward pass that can be run again.

    Attributes:
        args: of the call.
        kwargs: of the call.
        read: places of the output's tensors that the backward pass went through; empty where that is not known.
        check: calls what listens, in the middle of the backward pass: a guard's, from which no error comes out.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: set[int] = dataclasses.field(default_factory=set)
    check: Callable[..., Any] = _call

    def listen(self, output: Any) -> None:
        """Note which tensors of the output the backward pass goes through: a model may give some that nobody reads."""
        for place, tensor in enumerate(_tensors(output)):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, place=place: self.check(self.read.add, place))


def find_unused(model: nn.Module, names: Sequence[str], calls: Sequence[ForwardPass]) -> tuple[str, ...]:
    """Return the tensors with these names if no forward pass used them, else none of them.

    Vision towers compute layers whose output nothing reads, an expert may get no token, a tower no image. Each pass is
    run again with noise in these tensors: they are unused if what was read stays bit for bit what it is. That holds for
    tied weights, for weights that are read past their module, and under checkpointing. What is detached on its way to
    the loss is used: it changes the output. Nothing is said of a model that is sharded.
    """
    of_names = set(names)
    parameters = [parameter for name, parameter in model.named_parameters() if name in of_names]
    if not calls or any(hasattr(each, "ds_id") or hasattr(each, "to_local") for each in parameters):
        return ()
    kept = [(tensor, tensor.detach().clone()) for tensor in (*parameters, *model.buffers())]

    def run(noise: bool) -> list[torch.Tensor]:
        outputs = []
        with keep_random_state():
            for call in calls:
                for tensor, values in kept:
                    tensor.data.copy_(values)
                for parameter in parameters if noise else ():
                    with keep_random_state():
                        parameter.data.add_(torch.randn_like(parameter))
                output = _tensors(model(*call.args, **call.kwargs))
                outputs += [tensor for place, tensor in enumerate(output) if place in call.read or not call.read]
        return outputs

    try:
        with unseen(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reentrant checkpointing warns of each pass without gradients
            pairs = list(zip(run(noise=False), run(noise=True), strict=True))
    finally:
        for tensor, values in kept:
            tensor.data.copy_(values)
    same = bool(pairs) and all(torch.equal(before, after) for before, after in pairs)
    return tuple(names) if same else ()


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of what a model gives."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


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
