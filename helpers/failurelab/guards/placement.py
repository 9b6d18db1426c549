"""A guard for placement: before the first step, where is every tensor that this process is about to train?

    trainer = GRPOTrainer(..., callbacks=[PlacementGuard()])

It judges when training begins: the model that the trainer holds against the trainer's own device, in every process.
A trainer may still fail before that, while it is made; `placement.check` right after loading comes first.

Upstream: TRL #2760.
"""

from typing import Any

import torch

from failurelab import placement
from failurelab.guards.base import Guard


class PlacementGuard(Guard):
    """Stop or warn when a tensor of the model is on another device than the one trained on, before the first step.

    A model that a device map splits on purpose, in one process (`is_model_parallel`), is left to its hooks: only a
    layer that they do not serve is held against it. Mixed precision only ever warns: numbers are right, and it is slow.
    `report`, a `placement.PlacementReport`, is there after training has begun.

    Args:
        action: `stop` raises GuardTripped, `warn` issues a GuardWarning.
        device: to be trained on; by default the trainer's.
    """

    def __init__(self, action: str = "stop", *, device: str | int | torch.device | None = None):
        super().__init__(action)
        self.device = device

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Walk once through the model."""
        autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        device = args.device if self.device is None else self.device
        report = placement.check(model, device, autocast=autocast)
        self.report = report
        split = len({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}) > 1
        if report.first_to_fail or report.problems or (report.elsewhere and not split):
            self._trip(str(report), report)
        if report.precisions.mixed:
            self._warn("; ".join(report.precisions.mixed))
