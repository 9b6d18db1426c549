"""A guard that names the trainable parameters that the first optimizer step will leave as they are.

    trainer = GRPOTrainer(..., callbacks=[GradientGuard()])

Nothing is raised where gradients are missing (see `failurelab.gradients`), or where the optimizer does not hold the
parameters: it was made before the adapters, or these were loaded frozen. Where reentrant checkpointing leaves nothing
to go backward through, as under LoRA, it says so after the forward pass: backward() would end in torch's "element 0 of
tensors does not require grad".

Upstream: TRL #2671 (no gradient), #6700 and #3031 (an adapter that no optimizer holds).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from failurelab import gradients, plants
from failurelab._text import list_names
from failurelab.errors import raises_own
from failurelab.failures.predicates import Value
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

    A gradient of all zeros is no alarm: LoRA's A starts with one. Tensors that no forward pass used are told by a
    warning, and stop nothing, where others have a gradient (see `gradients.find_unused`). `report` is a
    `gradients.GradientReport` after the step, or earlier where nothing is trainable, the optimizer leaves something
    out, or no backward pass can run.

    Args:
        action: `stop` raises GuardTripped before the optimizer's first step, `warn` issues a GuardWarning.
        steps: optimizer steps to wait for, if a parameter may rightly get none in one batch.
    """

    failures = ("F1", "F2", "F23")

    def __init__(self, action: Action = "stop", *, steps: int = 1):
        super().__init__(action)
        if steps < 1:
            raise ValueError(f"steps={steps}: at least one step must run before its gradients can be judged")
        self.steps = steps
        self._steps_seen = 0
        self._watch: gradients.GradientWatch | None = None
        self._not_optimized: tuple[str, ...] = ()
        self._calls: list[gradients.ForwardPass] = []  # the training passes that were listened to
        self._figures: dict[str, Value] = {}
        self._controls: dict[str, Mapping[str, Value]] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Ask the optimizer what it holds, and start to listen."""
        self._stop()
        self.report, self._watch, self._steps_seen, self._not_optimized = None, None, 0, ()
        self._calls, self._controls = [], {}
        trainable = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        self._figures = gradients.count(model, optimizer)
        if not trainable and self._finds("F23", self._figures):
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

        def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            self._check(self._look_ahead, module, args, kwargs, output)

        hook = model.register_forward_hook(after, with_kwargs=True)
        self._listening.callback(hook.remove)

    def _judge_optimizer(self, model: nn.Module, optimizer: Any, trainable: tuple[str, ...]) -> None:
        """Tell of trainable tensors that no step will change, because the optimizer does not hold them."""
        left_out = () if optimizer is None else gradients.not_optimized(model, optimizer)
        self._not_optimized = left_out
        if optimizer is not None:
            self._controls = {
                "an empty optimizer": plants.empty_optimizer(model),
                "a tensor taken out of the optimizer": plants.taken_out(model, optimizer),
            }
        if self._finds("F23", self._figures):
            self.report = gradients.GradientReport(trainable, (), (), not_optimized=self._not_optimized)
            self._trip(
                f"the optimizer holds {len(trainable) - len(left_out)} of {len(trainable)} trainable tensors, and none "
                f"of its steps changes {list_names(self._not_optimized)}. It was made before they were there, or "
                "before they were set to be trained. Next: load an adapter with PeftModel.from_pretrained(model, "
                "adapter, is_trainable=True), and hand an optimizer of your own the parameters of the wrapped model",
                self.report,
                ("F23",),
            )

    def _look_ahead(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Tell, before the first backward pass, of a training pass that has nothing to go back through."""
        told = self.report is not None and self.report.without_gradient
        if told or not (torch.is_grad_enabled() and model.training):
            return
        call = gradients.ForwardPass(args, kwargs, check=self._check)
        call.listen(output)
        self._calls.append(call)
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
        results = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
        reentrant = any(kind == "reentrant" for kind, _ in gradients.checkpointed(model))
        if self._watch and reentrant and results and not any(result.requires_grad for result in results):
            self.report = self._watch.report()
            found = self._lacking(len(self.report.without_gradient))
            self._trip(f'the first backward pass will end in "element 0 ...": {self.report}', self.report, found)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Judge what the backward passes have reached."""
        self._steps_seen += 1
        if self._watch is None or self._steps_seen < self.steps or self._failed:
            return  # a watch that has failed once may have missed a gradient
        report, planted, self._watch = self._watch.report(), self._watch.planted(), None
        self._stop()
        calls, self._calls = self._calls, []
        missing = report.without_gradient
        unused = self._find_unused(model, missing, calls) if 0 < len(missing) < len(report.trainable) else ()
        left = tuple(name for name in report.without_gradient if name not in unused)
        self.report = dataclasses.replace(
            report, without_gradient=left, unused=unused, not_optimized=self._not_optimized
        )
        if unused:
            self._warn(
                f"after step {state.global_step + 1}, {self.report} That is no failure, where they need not train"
            )
        message = f"after step {state.global_step + 1}, {self.report}"
        if found := self._lacking(len(left)):
            self._trip(message, self.report, found)
            return
        figures = self._figures | {"steps_done": state.global_step + 1, "error": ""}
        controls = self._controls | {"a module cut off from the loss": planted}
        self._conclude(message, [figures], controls | {"a loss without a graph": plants.no_graph()})

    def _lacking(self, count: int) -> tuple[str, ...]:
        """Return as which failure so many tensors without a gradient are found."""
        self._figures["tensors_without_gradient"] = count
        return tuple(id for id in ("F1", "F2") if self._finds(id, self._figures))

    def _find_unused(
        self, model: nn.Module, names: tuple[str, ...], calls: list[gradients.ForwardPass]
    ) -> tuple[str, ...]:
        """Return those that the passes did not use; none where a pass cannot be run again: they are missing then."""
        try:
            return gradients.find_unused(model, names, calls)
        except Exception as error:
            if raises_own(error):
                raise
            return ()
