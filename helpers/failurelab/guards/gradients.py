"""A guard that names trainable parameters without a gradient, before the first optimizer step leaves them as they are.

    trainer = GRPOTrainer(..., callbacks=[GradientGuard()])

Nothing is raised where gradients are missing (see `failurelab.gradients`). The guard listens to the backward passes,
and changes nothing in the run. Where reentrant checkpointing leaves nothing to go backward through, as under LoRA, it
says so after the forward pass: backward() would end in torch's "element 0 of tensors does not require grad".
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from failurelab import gradients
from failurelab.guards.base import Action, Guard


class _Watch(gradients.GradientWatch):
    """Listens inside the guard's `_check`, so that an error while it listens does not end the backward pass."""

    def __init__(self, model: nn.Module, check: Callable[..., None]):
        self._check = check
        super().__init__(model)

    def _record(self, name: str, parameter: torch.Tensor) -> None:
        self._check(super()._record, name, parameter)


class GradientGuard(Guard):
    """Stop or warn when trainable parameters have got no gradient in the first step, before the optimizer's step.

    A gradient of all zeros is no alarm: LoRA's A starts with one. `report` is a `gradients.GradientReport` after the
    step, or before the first backward pass where that one cannot run.

    Args:
        action: `stop` raises GuardTripped before the optimizer's step, `warn` issues a GuardWarning.
        steps: optimizer steps to wait for, if a parameter may rightly get none in one batch: an expert that no token
            was routed to, a vision tower without an image.
        ignore: a regular expression for names of parameters that may go without a gradient.
    """

    def __init__(self, action: Action = "stop", *, steps: int = 1, ignore: str = ""):
        super().__init__(action)
        if steps < 1:
            raise ValueError(f"steps={steps}: at least one step must run before its gradients can be judged")
        self.steps, self.ignore = steps, ignore
        self._steps_seen = 0
        self._watch: gradients.GradientWatch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Start to listen."""
        self._stop()
        self.report, self._steps_seen = None, 0
        self._watch = self._listening.enter_context(_Watch(model, self._check))
        hook = model.register_forward_hook(lambda module, _, output: self._check(self._look_ahead, module, output))
        self._listening.callback(hook.remove)

    def _look_ahead(self, model: nn.Module, output: Any) -> None:
        """Tell, before the first backward pass, of a training pass that has nothing to go back through."""
        if self.report is not None or not (torch.is_grad_enabled() and model.training):
            return
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
        results = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
        reentrant = any(kind == "reentrant" for kind, _ in gradients.checkpointed(model))
        if reentrant and results and not any(result.requires_grad for result in results):
            self.report = self._watch.report()
            self._trip(f'the first backward pass will end in "element 0 ...": {self.report}', self.report)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge what the backward passes have reached."""
        self._steps_seen += 1
        if self._watch is None or self._steps_seen < self.steps or self._failed:
            return  # a watch that has failed once may have missed a gradient
        self.report, self._watch = self._watch.report(), None
        self._stop()
        names = self.report.without_gradient
        if any(not (self.ignore and re.search(self.ignore, name)) for name in names):
            self._trip(f"after step {state.global_step + 1}, {self.report}", self.report)
        else:
            self._held(f"after step {state.global_step + 1}, {self.report}")
