"""A guard that names the trainable parameters that the first optimizer step will leave as they are.

    trainer = GRPOTrainer(..., callbacks=[GradientGuard()])

Nothing is raised where gradients are missing (see `failurelab.gradients`), or where the optimizer does not hold the
parameters: it was made before the adapters, or these were loaded frozen. The guard asks the optimizer when training
begins, listens to the backward passes, and changes nothing in the run. Where reentrant checkpointing leaves nothing to
go backward through, as under LoRA, it says so after the forward pass: backward() would end in torch's "element 0 of
tensors does not require grad".

Upstream: TRL #2671 (no gradient), #6700 and #3031 (an adapter that no optimizer holds).
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from failurelab import gradients
from failurelab._text import list_names
from failurelab.guards.base import Action, Guard


class _Watch(gradients.GradientWatch):
    """Listens inside the guard's `_check`, so that an error while it listens does not end the backward pass."""

    def __init__(self, model: nn.Module, check: Callable[..., None]):
        self._check = check
        super().__init__(model)

    def _record(self, name: str, parameter: torch.Tensor) -> None:
        self._check(super()._record, name, parameter)


class GradientGuard(Guard):
    """Stop or warn when trainable parameters have got no gradient in the first step, or no optimizer that holds them.

    A gradient of all zeros is no alarm: LoRA's A starts with one. `report` is a `gradients.GradientReport` after the
    step, or earlier where nothing is trainable, the optimizer leaves something out, or no backward pass can run.

    Args:
        action: `stop` raises GuardTripped before the optimizer's first step, `warn` issues a GuardWarning.
        steps: optimizer steps to wait for, if a parameter may rightly get none in one batch: an expert that no token
            was routed to, a vision tower without an image.
        ignore: a regular expression for names of parameters that may go without a gradient.
    """

    failures = ("F1", "F2", "F23")

    def __init__(self, action: Action = "stop", *, steps: int = 1, ignore: str = ""):
        super().__init__(action)
        if steps < 1:
            raise ValueError(f"steps={steps}: at least one step must run before its gradients can be judged")
        self.steps, self.ignore = steps, ignore
        self._steps_seen = 0
        self._watch: gradients.GradientWatch | None = None
        self._not_optimized: tuple[str, ...] = ()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Ask the optimizer what it holds, and start to listen."""
        self._stop()
        self.report, self._watch, self._steps_seen, self._not_optimized = None, None, 0, ()
        trainable = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        if not trainable:
            self.report = gradients.GradientReport((), (), ())
            self._trip(
                "nothing is trainable: no parameter of the model requires a gradient. Steps will be logged, and no "
                "weight will move. Next: an adapter that is to be trained on is loaded with "
                "PeftModel.from_pretrained(model, adapter, is_trainable=True)",
                self.report,
                ("F23",),
            )
            return
        self._judge_optimizer(model, optimizer, trainable)
        self._watch = self._listening.enter_context(_Watch(model, self._check))
        hook = model.register_forward_hook(lambda module, _, output: self._check(self._look_ahead, module, output))
        self._listening.callback(hook.remove)

    def _judge_optimizer(self, model: nn.Module, optimizer: Any, trainable: tuple[str, ...]) -> None:
        """Tell of trainable tensors that no step will change, because the optimizer does not hold them."""
        left_out = () if optimizer is None else gradients.not_optimized(model, optimizer)
        self._not_optimized = tuple(name for name in left_out if not self._ignores(name))
        if self._not_optimized:
            self.report = gradients.GradientReport(trainable, (), (), not_optimized=self._not_optimized)
            self._trip(
                f"the optimizer holds {len(trainable) - len(left_out)} of {len(trainable)} trainable tensors, and none "
                f"of its steps changes {list_names(self._not_optimized)}. It was made before they were there, or "
                "before they were set to be trained. Next: load an adapter with PeftModel.from_pretrained(model, "
                "adapter, is_trainable=True), and hand an optimizer of your own the parameters of the wrapped model",
                self.report,
                ("F23",),
            )

    def _ignores(self, name: str) -> bool:
        return bool(self.ignore and re.search(self.ignore, name))

    def _look_ahead(self, model: nn.Module, output: Any) -> None:
        """Tell, before the first backward pass, of a training pass that has nothing to go back through."""
        told = self.report is not None and self.report.without_gradient
        if told or not (torch.is_grad_enabled() and model.training):
            return
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
        results = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
        reentrant = any(kind == "reentrant" for kind, _ in gradients.checkpointed(model))
        if self._watch and reentrant and results and not any(result.requires_grad for result in results):
            self.report = self._watch.report()
            self._trip(f'the first backward pass will end in "element 0 ...": {self.report}', self.report, ("F2",))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge what the backward passes have reached."""
        self._steps_seen += 1
        if self._watch is None or self._steps_seen < self.steps or self._failed:
            return  # a watch that has failed once may have missed a gradient
        report, self._watch = self._watch.report(), None
        self.report = dataclasses.replace(report, not_optimized=self._not_optimized)
        self._stop()
        if not all(map(self._ignores, self.report.without_gradient)):
            self._trip(f"after step {state.global_step + 1}, {self.report}", self.report, ("F1",))
        else:
            self._held(f"after step {state.global_step + 1}, {self.report}")
