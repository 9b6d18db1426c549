"""A guard for optimizer steps with gradients that leave the weights as they were.

    trainer = GRPOTrainer(..., callbacks=[UpdateGuard()])

Nothing is raised where a step is lost, and grad_norm and loss look healthy. The step rounds to nothing (see
`failurelab.updates`), or the optimizer steps something else. The guard takes a sample of each tensor that the optimizer
holds, compares it before and after the first steps, and counts which share of the elements moved, at the full learning
rate. It changes nothing in the run. What the optimizer does not hold, `GradientGuard` tells.
"""

import dataclasses
from typing import Any

import torch

from failurelab import plants, updates
from failurelab._text import dtype_name
from failurelab._unwrap import has_adapter
from failurelab.guards.base import Action, Guard

_WIDE = (
    "load the weights in float32 (dtype=torch.float32) and compute under bf16=True, use an optimizer that keeps "
    "float32 copies, or "
)
_SAMPLE = 4096  # elements of each tensor
_COPIES = ("master", "kahan", "compensation")  # what optimizers call what they keep beside the weights


@dataclasses.dataclass(frozen=True)
class RoundedReport:
    """What the steps did to the elements of the sample that had a gradient.

    Attributes:
        elements: of the tensors, with a gradient that is not zero, added up over the steps.
        changed: of these, how many a step has changed.
        predicted: the share that steps as large as the learning rate change, by `updates.expected_share`.
        dtypes: of the tensors.
        from_zero: how many of these were all zero at first, such as an adapter's B, which any step changes then.
        rest: share of the other tensors' elements that a step changed; None where there are no others.
        grade: `lost`, `slowed` or `whole` (see `updates.grade`).
    """

    elements: int
    changed: int
    predicted: float
    dtypes: tuple[str, ...]
    from_zero: int
    rest: float | None
    grade: str

    @property
    def share(self) -> float:
        """Share of the elements with a gradient that a step changed."""
        return self.changed / self.elements


class UpdateGuard(Guard):
    """Warn or stop when optimizer steps leave all, or nearly all, elements that have a gradient as they were.

    Where none moves, and rounding does not explain it, the optimizer steps something else (F23).

    Judged once, in the first `steps` optimizer steps in which the learning rate no longer rises: the weights in 16
    bits, or all where none are. Weights whose copies an optimizer steps are not judged (DeepSpeed's, or one with master
    weights). Stochastic rounding is no alarm: elements then move that no step could move by rounding to nearest. Where
    a part of the elements changes, as in QLoRA's adapters, which trl casts to bfloat16, the run is slowed: that is a
    note, also where the action is `stop`. `report` is a `RoundedReport` once steps were compared.

    Args:
        action: `warn` issues a GuardWarning, `stop` raises GuardTripped.
        least: share of the elements with a gradient below which a step is lost.
        steps: optimizer steps to compare.
    """

    failures = ("F9", "F23")

    def __init__(self, action: Action = "warn", *, least: float = updates.LOST, steps: int = 3):
        super().__init__(action)
        if not 0 < least <= 1:
            raise ValueError(f"least={least}: a share between 0 and 1 is to change")
        if steps < 2:
            raise ValueError(f"steps={steps}: two steps are needed")
        self.least, self.steps = least, steps
        self._from_zero: set[int] | None = None  # ids of parameters
        self._forget()
        self._done = True

    def _forget(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
        self._counts = [0, 0, 0.0, 0.0, 0.0]  # elements, changed, predicted, moved past rounding, expected of these
        self._rest = [0, 0, 0.0]  # of tensors that were not zero at first: elements, changed, those of the control
        self._compared: list[tuple[int, float]] = []  # of each step that was compared: its number, and the rate
        self._rate = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin anew."""
        self._forget()
        self.report, self._done, self._from_zero = None, False, None

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Take the sample."""
        self._before = []
        if self._done:
            return
        if optimizer is None:
            self._done = True
            self._could_not_check("the trainer hands callbacks no optimizer, so its learning rates are not known")
            return
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        trained = [p for p in model.parameters() if p.requires_grad and id(p) in rates and not updates.not_judged(p)]
        if not trained:
            self._done = True
            return
        # beside tensors in 16 bits those in float32 would hide what is lost
        judged = [parameter for parameter in trained if parameter.dtype.itemsize < 4] or trained
        self._adapters = has_adapter(model)
        if self._from_zero is None:
            self._from_zero = {id(parameter) for parameter in judged if not parameter.detach().any()}
        rate = max(rates.values())
        if not self._compared or rate > self._compared[0][1]:  # it still warms up: what was compared was at a lower one
            self._forget()
        self._rate = rate
        for parameter in judged:
            if rates.get(id(parameter)) and parameter.grad is not None:
                weights, gradient = (self._take(each) for each in (parameter, parameter.grad))
                # what has next to no gradient takes a smaller step in any dtype
                moved = gradient.abs() > 1e-6 * gradient.abs().amax()
                self._before.append((parameter, weights, moved, float(rates[id(parameter)])))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Compare the sample, and judge after the last of the steps."""
        before, self._before = self._before, []
        if getattr(optimizer, "step_was_skipped", False):
            return
        if self._done or not any(row[2].any() for row in before):
            return
        for parameter, weights, moved, rate in before:
            self._count(weights[moved], self._take(parameter)[moved], rate, id(parameter) in (self._from_zero or ()))
        self._compared.append((state.global_step + 1, self._rate))
        if len(self._compared) >= self.steps:
            self._done = True
            self._judge([row[0] for row in before], optimizer)

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of at most _SAMPLE elements, evenly spaced."""
        tensor = tensor.detach()
        flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).reshape(-1)
        return flat[:: max(1, -(-flat.numel() // _SAMPLE))].clone()

    def _count(self, before: torch.Tensor, after: torch.Tensor, rate: float, from_zero: bool) -> None:
        if not before.numel():
            return
        changed = before != after
        wide = before.double() if before.dtype.itemsize >= 4 else before.float()
        gap = torch.ldexp(torch.full_like(wide, torch.finfo(before.dtype).eps), torch.frexp(wide).exponent - 1)
        # by a step of less than four learning rates: just above a power of two the neighbour below is half as far
        out_of_reach = (gap > 16 * rate) & (wide != 0)
        self._counts[0] += before.numel()
        self._counts[1] += int(changed.sum())
        if not from_zero:
            self._rest[0] += before.numel()
            self._rest[1] += int(changed.sum())
            self._rest[2] += plants.shorter_step(before, after)["elements_moved"] * before.numel()
        self._counts[2] += updates.expected_share(wide, rate, dtype=before.dtype) * before.numel()
        self._counts[3] += int((changed & out_of_reach).sum())
        self._counts[4] += float((rate / gap[out_of_reach]).sum())

    def _judge(self, tensors: list[torch.Tensor], optimizer: Any) -> None:
        (elements, changed), (predicted, moved, expected) = map(int, self._counts[:2]), self._counts[2:]
        dtypes = tuple(sorted({dtype_name(tensor.dtype) for tensor in tensors}))
        zeros = sum(id(tensor) in (self._from_zero or ()) for tensor in tensors)
        rest = self._rest[1] / self._rest[0] if self._rest[0] else None
        # a tensor that begins at zero moves while it is small: it says nothing of later steps, and the run learns by it
        figures = {"tensors_trainable": len(tensors), "elements_moved": changed / elements}
        lost = self._finds("F9", figures | {"elements_moved": changed / elements * updates.LOST / self.least})
        grade = "lost" if lost else updates.grade(changed / elements, 0)
        if grade == "whole" and rest is not None:
            grade = updates.grade(rest, 0)
        self.report = report = RoundedReport(elements, changed, predicted / elements, dtypes, zeros, rest, grade)
        others = f" ({zeros} that began at zero aside, {rest:.2%})" if zeros and rest is not None else ""
        (first, highest), (last, lowest) = self._compared[0], self._compared[-1]
        rates = f"learning rate {highest:g}" if highest == lowest else f"learning rates of {highest:g} to {lowest:g}"
        found = (
            f"in steps {first} to {last} together, at {rates}, {report.share:.2%} of the elements with a gradient "
            f"changed{others} ({' and '.join(dtypes)}, {len(tensors)} tensors; {report.predicted:.2%} are predicted)"
        )
        if grade == "whole":
            shorter = self._rest[2] / self._rest[0] if self._rest[0] else None
            self._conclude(found, [figures], {"a step a thousandth as long": {"elements_moved": shorter}}, ("F9",))
        elif _keeps_copies(optimizer, tensors):
            self._held(f"{found}; the optimizer keeps beside the weights what rounding loses")
        elif moved > 0.1 * expected:
            self._held(f"{found}; elements move that rounding to nearest would leave: it is rounded stochastically")
        elif not changed and report.predicted > self.least:
            self._trip(
                f"{found}: that is no rounding. Next: find what the optimizer steps instead of the model",
                report,
                ("F23",),
            )
        elif grade == "slowed":
            where = (
                "a larger learning rate"
                if "float32" in dtypes
                else "cast the adapters back, updates.to_float32(trainer.model), after the trainer is made"
                if self._adapters
                else "load the weights in float32 (dtype=torch.float32) and compute under bf16=True"
            )
            self._warn(
                f"{found}: the other steps round to nothing. The run learns, and more slowly than without rounding. "
                f"Next: {where}"
            )
        else:
            self._trip(
                f"{found}: the steps are less than half of the distance between two such numbers, and round to "
                f"nothing. Next: {'' if 'float32' in dtypes else _WIDE}a larger learning rate",
                report,
                ("F9",),
            )


def _keeps_copies(optimizer: Any, parameters: list[torch.Tensor]) -> bool:
    """Whether the optimizer keeps, for any of these, a wider copy or what rounding has lost."""
    for parameter in parameters:
        for name, value in (optimizer.state.get(parameter) or {}).items():
            if any(word in str(name).lower() for word in _COPIES):
                return True
            wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.shape == parameter.shape
            if wide and torch.equal(value.to(parameter.dtype), parameter):
                return True
    return False
