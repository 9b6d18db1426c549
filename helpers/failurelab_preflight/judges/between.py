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
        self._after: Sample = {}
        self._changed = self._reference_changed = ""  # when
        self._stepped = False
        self._counts = [0, 0, 0]  # elements with a gradient; moved by the step; moved as the next one begins

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
        self._policy, self._reference = self._take(self._trainer.model), self._take(self._of_reference())

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare with what the step before has left, and count what is left of it."""
        now = self._compare("before a step")
        self._count(now)
        self._stepped = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Compare with the beginning of the step; what another judge moves for a step is not looked at."""
        self._before = None
        if self._training.moved:
            return
        now = self._compare("within a step")
        groups = getattr(optimizer or self._trainer.optimizer, "param_groups", ())
        rate = max((group["lr"] for group in groups), default=0.0)
        if rate and rate >= _RATE * float(self._training.arguments.get("learning_rate") or 0.0):
            named = self._trainer.model.named_parameters()
            self._before = now, {name: _part(each.grad) for name, each in named if each.grad is not None}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take what the optimizer made."""
        self._policy = self._after = self._take(self._trainer.model)
        self._stepped = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare with it, behind the script's callbacks, and before what another judge had moved is put back."""
        if (
            self._training.moved or not self._stepped
        ):  # put back behind this call; or a loop that does not tell of steps
            self._policy = {}
            return
        now = self._compare("after a step")
        if state.global_step >= state.max_steps and not self._counts[0]:  # no other step begins that could show it
            self._count(now)

    def answers(self) -> Iterator[Finding]:
        """Yield what is not known by it, and a step that is taken back."""
        elements, stepped, left = self._counts
        share = left / elements if elements else None
        judged = verdicts.judge(failures.get("F9"), [{"tensors_trainable": 1, "elements_moved": share}])
        if self._changed:
            known = [each for each in self._trainer.callback_handler.callbacks if self._is_own(each)]
            names = ", ".join(dict.fromkeys(type(each).__name__ for each in known))
            said = f"something else than the optimizer changes the policy's weights {self._changed}"
            said += f" (the script's callbacks: {names})" * bool(names)
            if judged.verdict == verdicts.FOUND:
                said += f": {stepped / elements:.1%} of the numbers with a gradient move by a step of the cut training"
                said += f", and {left / elements:.1%} are others as the next one begins"
                repair = (
                    "Write into a copy of the weights, and leave those that are trained as the optimizer made them."
                )
                yield Finding("F9", said, repair, origin=SCRIPT, fault="between")
            else:
                yield Finding.not_checked("F9", f"{said}; how much of a step is left in the whole run is not known")
            if self._training.adapters:
                yield Finding.not_checked("F8", f"{said}; the adapter was looked at as training began")
        when = self._changed or self._reference_changed
        compared = self._training.arguments.get("beta") != 0 and hasattr(self._trainer, "ref_model")
        if when and compared:
            whose = "the policy's weights" if self._changed else "the reference's weights"
            why = f"something else than the optimizer changes {whose} {when}; they were compared as training began"
            yield Finding.not_checked("F19", why)
        if not self._changed and judged.verdict == verdicts.FOUND:
            why = f"{share:.1%} of the numbers with a gradient move in a step of the cut training"
            yield Finding.not_checked("F9", f"{why}, which the load does not explain")

    def _is_own(self, callback: Any) -> bool:
        codes = (getattr(method, "__code__", None) for method in vars(type(callback)).values())
        return any(code is not None and self._training.own(code.co_filename) for code in codes)

    def _of_reference(self) -> Any:
        return getattr(self._trainer, "ref_model", None)

    def _take(self, model: Any) -> Sample:
        named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
        return {name: _part(parameter) for name, parameter in named}

    def _compare(self, when: str) -> Sample:
        """Note whether weights are others than when they were last seen, and return them."""
        now, reference = self._take(self._trainer.model), self._take(self._of_reference())
        if self._policy and not _same(self._policy, now):
            self._changed = self._changed or when
        if not _same(self._reference, reference):
            self._reference_changed = self._reference_changed or when
        self._policy, self._reference = now, reference
        return now

    def _count(self, now: Sample) -> None:
        """Count which elements with a gradient the last step has moved, right behind it and now."""
        if self._before is None or not self._after:
            return
        before, gradients = self._before
        for name, gradient in gradients.items():
            moved = gradient.abs() > 1e-6 * gradient.abs().amax()
            if name in now and name in self._after:
                self._counts[0] += int(moved.sum())
                self._counts[1] += int((moved & (before[name] != self._after[name])).sum())
                self._counts[2] += int((moved & (before[name] != now[name])).sum())
        self._before, self._after = None, {}


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of at most _SAMPLE elements, evenly spaced."""
    flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _SAMPLE))].clone()


def _same(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
