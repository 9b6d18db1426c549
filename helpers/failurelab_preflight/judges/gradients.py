"""F1 and F2: trainable tensors that get no gradient in the first step, without adapters and with them.

Upstream: the registry's F1 and F2.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from failurelab import gradients, guards, plants
from failurelab._text import list_names
from failurelab._unwrap import has_adapter
from failurelab.handles import is_unseen
from failurelab_preflight.finding import Finding, Quantity
from failurelab_preflight.judges.guarded import Guarded
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.repairs import Arguments, Statement
from failurelab_preflight.training import Training

# where nothing can stand between the making of the trainer and its training
_NON_REENTRANT = Arguments({"gradient_checkpointing_kwargs": {"use_reentrant": False}})


class GradientJudge:
    """Listens with a GradientGuard, and notes the kinds of checkpointing in the passes that it judges."""

    def __init__(self, training: Training):
        self._training, self._model = training, training.trainer.model
        self._guarded = Guarded(guards.GradientGuard, training.trainer)
        self._checkpointing: set[str] = set()
        self._enabled = torch.is_grad_enabled()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the training is listened to."""
        self._guarded.listen()
        with self._model.register_forward_hook(self._note_checkpointing):
            yield

    def misses_gradients(self) -> bool:
        """Whether it has found by now that tensors have no gradient, by checkpointing: else the step tells why."""
        return self._guarded.found and "reentrant" in self._checkpointing

    def _note_checkpointing(self, model: torch.nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled() and not is_unseen():
            self._checkpointing |= {kind for kind, _ in gradients.checkpointed(model)}

    def answers(self) -> Iterator[Finding]:
        """Yield what was seen, after training, or after the error that ended it."""
        report, adapted = self._guarded.report, has_adapter(self._model)
        own, other = ("F2", "F1") if adapted else ("F1", "F2")
        yield Finding.not_applicable(other, "the model has adapters: see F2" if adapted else "no adapters")
        yield self._answer(own, report)

    def _answer(self, own: str, report: Any) -> Finding:
        if not self._enabled:
            return Finding(
                own,
                "gradients are switched off as training begins (torch.is_grad_enabled() is False): the first backward "
                'pass ends in "element 0 of tensors does not require grad"',
                "torch.set_grad_enabled(True) before training; evaluate under `with torch.no_grad():`, which ends.",
                undo=Statement("torch.set_grad_enabled(True)", imports="import torch"),
                ends=True,
            )
        if report is None:
            why = self._guarded.failed or "no optimizer step was reached whose gradients could be seen"
            return Finding.not_checked(own, why)
        missing, total = len(report.without_gradient), len(report.trainable)
        if report.unused:
            unused = f"{len(report.unused)} of {total} trainable tensors: {list_names(report.unused)}"
            if not missing:  # a merged adapter's, say: whether they would get one was not seen
                return Finding.not_checked(own, f"all others get a gradient, and no forward pass used {unused}")
            self._training.notes.append(f"no forward pass used {unused}")
        figures = (Quantity("tensors_without_gradient", missing, "tensors", total),)
        if not total:
            return Finding.not_checked(own, "nothing requires a gradient when training begins: see F23")
        measured = gradients.count(self._model) | {"tensors_without_gradient": missing, "steps_done": 1, "error": ""}
        controls = {"a loss without a graph": plants.no_graph()}
        if not missing:
            controls["a module cut off from the loss"] = plants.cut_off(self._model)
        evidence = f"all {total} trainable tensors of {self._training.model_name} get a gradient"
        if settled := settle(own, [measured], controls, evidence, figures=figures):
            return settled
        lost = (
            f"{missing} of {total} trainable tensors of {self._training.model_name} get no gradient in the first step"
        )
        lost += f" ({list_names(report.without_gradient)})"
        if "reentrant" not in self._checkpointing:
            why = "checkpointing is not the cause: something may detach what is computed with them"
            return Finding.not_checked(own, f"{lost}, and {why}")
        ends = '; the first backward pass ends in "element 0 of tensors does not require grad"' * (missing == total)
        return Finding(
            own,
            f"{lost}: reentrant gradient checkpointing cuts layers off whose input needs none{ends}",
            "trainer.model.enable_input_require_grads() before training, or "
            "gradient_checkpointing_kwargs={'use_reentrant': False} in the arguments",
            undo=(Statement("{trainer}.model.enable_input_require_grads()"), _NON_REENTRANT),
            figures=figures,
        )
