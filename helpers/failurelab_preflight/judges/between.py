"""F8, F9 and F19 again: weights that something else than the optimizer changes once training has begun.

These failures are measured as training begins, or told from the load. A callback of the script's that writes into the
weights at a step's beginning or end makes another adapter or reference of them, or takes the step back: then what was
held is not known, and a step that nothing is left of is F9.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from failurelab import failures
from failurelab.failures import verdicts
from failurelab_preflight.finding import SCRIPT, Finding
from failurelab_preflight.training import Training

_SAMPLE = 4096  # elements of each tensor
_RATE = 0.1  # of the learning rate that is asked for: a step below it is of the warm-up
Sample = dict[str, torch.Tensor]


class BetweenJudge(TrainerCallback):
    """Takes a sample of the weights around each step, behind the script's own callbacks, and compares."""

    def __init__(self, training: Training):
        self._training, self._trainer = training, training.trainer
        self._policy: Sample = {}  # as it was last seen
        self._reference: Sample = {}
        self._before: tuple[Sample, Sample] | None = None  # weights and gradients as the optimizer steps
        self._changed = self._reference_changed = ""  # when
        self._stepped = False
        self._with_gradient = self._moved = 0  # elements with a gradient; those that are others as the next step begins

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the training is listened to."""
        self._trainer.add_callback(self)
        try:
            yield
        finally:
            self._trainer.remove_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the first sample."""
        self._policy, self._reference = self._take()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare with what the step before has left, and count what is left of it."""
        self._compare("before a step")
        self._count()
        self._stepped = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Compare with the beginning of the step; what another judge moves for a step is not looked at."""
        self._before = None
        if self._training.moved:
            return
        self._compare("within a step")
        groups = getattr(optimizer or self._trainer.optimizer, "param_groups", ())
        rate = max((group["lr"] for group in groups), default=0.0)
        if rate and rate >= _RATE * float(self._training.arguments.get("learning_rate") or 0.0):
            named = self._trainer.model.named_parameters()
            self._before = self._policy, {name: _part(each.grad) for name, each in named if each.grad is not None}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take what the optimizer made."""
        self._policy, _reference = self._take()
        self._stepped = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare with it, behind the script's callbacks, and before what another judge had moved is put back."""
        if self._training.moved or not self._stepped:  # put back behind this call; or a loop that tells of no steps
            self._policy = {}
            return
        self._compare("after a step")
        if state.global_step >= state.max_steps and not self._with_gradient:  # no other step begins that could show it
            self._count()

    def answers(self) -> Iterator[Finding]:
        """Yield what is not known by it, and a step that is taken back."""
        share = self._moved / self._with_gradient if self._with_gradient else None
        judged = verdicts.judge(failures.get("F9"), [{"tensors_trainable": 1, "elements_moved": share}])
        lost = f"{share:.1%} of the numbers with a gradient" if judged.verdict == verdicts.FOUND else ""
        names = ", ".join(dict.fromkeys(type(each).__name__ for each in self._callbacks()))
        by = f"something else than the optimizer changes the {{}} weights {{}} (the script's callbacks: {names})"
        said = by.format("policy's", self._changed)
        if self._changed and lost:
            repair = "Write into a copy of the weights, and leave those that are trained as the optimizer made them."
            said_of_step = f"{said}: {lost} are others as the next step begins"
            yield Finding("F9", said_of_step, repair, origin=SCRIPT, fault="between")
        elif self._changed:
            yield Finding.not_checked("F9", f"{said}; how much of a step is left in the whole run is not known")
        elif lost:
            why = f"{lost} move in a step of the cut training, which the load does not explain"
            yield Finding.not_checked("F9", why)
        if self._changed and self._training.adapters:
            yield Finding.not_checked("F8", f"{said}; the adapter was looked at as training began")
        compared = self._training.arguments.get("beta") != 0 and hasattr(self._trainer, "ref_model")
        if compared and (self._changed or self._reference_changed):
            said = said if self._changed else by.format("reference's", self._reference_changed)
            yield Finding.not_checked("F19", f"{said}; they were compared as training began")

    def _callbacks(self) -> Iterator[Any]:
        """Yield those of the script's own."""
        for callback in self._trainer.callback_handler.callbacks:
            codes = (getattr(method, "__code__", None) for method in vars(type(callback)).values())
            if any(code is not None and self._training.own(code.co_filename) for code in codes):
                yield callback

    def _take(self) -> tuple[Sample, Sample]:
        """Return samples of the policy and of its reference."""
        models = self._trainer.model, getattr(self._trainer, "ref_model", None)
        named = [model.named_parameters() if isinstance(model, torch.nn.Module) else () for model in models]
        policy, reference = ({name: _part(parameter) for name, parameter in each} for each in named)
        return policy, reference

    def _compare(self, when: str) -> None:
        """Note whether weights are others than when they were last seen."""
        policy, reference = self._take()
        if self._policy and not _same(self._policy, policy):
            self._changed = self._changed or when
        if not _same(self._reference, reference):
            self._reference_changed = self._reference_changed or when
        self._policy, self._reference = policy, reference

    def _count(self) -> None:
        """Count which elements with a gradient the last step has moved."""
        if self._before is None or not self._stepped:
            return
        (before, gradients), self._before = self._before, None
        for name, gradient in gradients.items():
            chosen = gradient.abs() > 1e-6 * gradient.abs().amax()
            self._with_gradient += int(chosen.sum())
            self._moved += int((chosen & (before[name] != self._policy[name])).sum())


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of at most _SAMPLE elements, evenly spaced."""
    flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _SAMPLE))].clone()


def _same(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
