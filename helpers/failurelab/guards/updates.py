"""A guard for updates that round to nothing: optimizer steps with gradients that leave the weights as they were.

    trainer = GRPOTrainer(..., callbacks=[UpdateGuard()])

Nothing is raised where a step is lost (see `failurelab.updates`), and grad_norm and loss look healthy. The guard takes
a sample of each tensor that the optimizer itself steps in less than 32 bits, and compares it before and after the first
steps at the full learning rate. It changes nothing in the run.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from failurelab import updates
from failurelab.guards.base import Action, Guard

_COPIES = ("master", "kahan", "compensation")  # what optimizers call what they keep beside the weights


@dataclasses.dataclass(frozen=True)
class RoundedReport:
    """What the steps did to the elements of the sample that had a gradient.

    Attributes:
        steps: that were compared.
        elements: of these tensors with a gradient that is not zero, added up over the steps.
        changed: of these, how many a step has changed.
        predicted: the share that steps as large as the learning rate change, by `updates.expected_share`.
        learning_rate: the highest of these steps.
        dtypes: of the tensors.
        tensors: how many there are.
    """

    steps: int = 0
    elements: int = 0
    changed: int = 0
    predicted: float = 0.0
    learning_rate: float = 0.0
    dtypes: tuple[str, ...] = ()
    tensors: int = 0

    @property
    def share(self) -> float:
        """Share of the elements with a gradient that a step changed."""
        return self.changed / max(self.elements, 1)


class UpdateGuard(Guard):
    """Warn or stop when optimizer steps leave nearly all elements that have a gradient as they were.

    Judged once, in the first `steps` optimizer steps in which the learning rate no longer rises. Weights in float32 are
    not judged: a step of a usual size is not lost there. Nor are those whose copies an optimizer steps (DeepSpeed's, or
    one with master weights). Stochastic rounding is no alarm: elements then move that no step could move by rounding
    to nearest. `report` is a `RoundedReport` once steps were compared.

    Args:
        action: `warn` issues a GuardWarning, `stop` raises GuardTripped.
        least: share of the elements with a gradient that is to change in a step.
        steps: optimizer steps to compare.
        sample: elements of each tensor that are compared.
    """

    def __init__(self, action: Action = "warn", *, least: float = 0.1, steps: int = 3, sample: int = 4096):
        super().__init__(action)
        if not 0 < least <= 1:
            raise ValueError(f"least={least}: a share between 0 and 1 is to change")
        if steps < 2 or sample < 1:
            raise ValueError(f"steps={steps}, sample={sample}: two steps and an element are needed")
        self.least, self.steps, self.sample = least, steps, sample
        self._forget()
        self._done = True

    def _forget(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
        self._counts = [0, 0, 0.0, 0.0, 0.0]  # elements, changed, predicted, moved past rounding, expected of these
        self._steps_seen, self._rate = 0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin anew."""
        self._forget()
        self.report, self._done = None, False

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Take the sample."""
        self._before = []
        if self._done:
            return
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        trained = [p for p in model.parameters() if p.requires_grad and id(p) in rates and not updates.not_judged(p)]
        low = [parameter for parameter in trained if parameter.dtype.itemsize < 4]
        if not low:
            self._done = True
            self._held("the optimizer steps none of the model's tensors in less than 32 bits, so no step is lost")
            return
        rate = max(rates.values())
        if rate > self._rate:  # it still warms up: what was compared was at a lower one
            self._forget()
            self._rate = rate
        for parameter in low:
            if rates.get(id(parameter)) and parameter.grad is not None:
                weights, gradient = (self._take(each) for each in (parameter, parameter.grad))
                # what has next to no gradient takes a smaller step in any dtype
                moved = gradient.abs() > 1e-6 * gradient.abs().amax()
                self._before.append((parameter, weights, moved, float(rates[id(parameter)])))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Compare the sample, and judge after the last of the steps."""
        before, self._before = self._before, []
        if self._done or getattr(optimizer, "step_was_skipped", False) or not any(row[2].any() for row in before):
            return
        for parameter, weights, moved, rate in before:
            self._count(weights[moved], self._take(parameter)[moved], rate)
        self._steps_seen += 1
        if self._steps_seen >= self.steps:
            self._done = True
            self._judge([row[0] for row in before], optimizer, state.global_step + 1)

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of at most `sample` elements, evenly spaced."""
        tensor = tensor.detach()
        flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).reshape(-1)
        return flat[:: max(1, -(-flat.numel() // self.sample))].clone()

    def _count(self, before: torch.Tensor, after: torch.Tensor, rate: float) -> None:
        if not before.numel():
            return
        changed = before != after
        wide = before.float()
        gap = torch.ldexp(torch.full_like(wide, torch.finfo(before.dtype).eps), torch.frexp(wide).exponent - 1)
        # by a step of less than four learning rates: just above a power of two the neighbour below is half as far
        out_of_reach = (gap > 16 * rate) & (wide != 0)
        self._counts[0] += before.numel()
        self._counts[1] += int(changed.sum())
        self._counts[2] += updates.expected_share(wide, rate, dtype=before.dtype) * before.numel()
        self._counts[3] += int((changed & out_of_reach).sum())
        self._counts[4] += float((rate / gap[out_of_reach]).sum())

    def _judge(self, tensors: list[torch.Tensor], optimizer: Any, step: int) -> None:
        elements, changed, predicted, moved, expected = self._counts
        dtypes = tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
        self.report = report = RoundedReport(
            self._steps_seen, elements, changed, predicted / elements, self._rate, dtypes, len(tensors)
        )
        found = (
            f"in step {step}, at learning rate {self._rate:g}, {report.share:.2%} of the elements with a gradient "
            f"changed ({' and '.join(dtypes)}, {len(tensors)} tensors; {report.predicted:.2%} are predicted)"
        )
        if report.share >= self.least:
            self._held(found)
        elif _keeps_copies(optimizer, tensors):
            self._held(f"{found}; the optimizer keeps beside the weights what rounding loses")
        elif moved > 0.1 * expected:
            self._held(f"{found}; elements move that rounding to nearest would leave: it is rounded stochastically")
        else:
            self._trip(
                f"{found}: the steps are less than half of the distance between two such numbers, and round to "
                "nothing. Next: load the weights in float32 (dtype=torch.float32) and compute under bf16=True, use an "
                "optimizer that keeps float32 copies, or a larger learning rate",
                report,
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
