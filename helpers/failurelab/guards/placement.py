"""A guard that compares, before the first step, the device of every tensor with the device that is trained on.

    trainer = GRPOTrainer(..., callbacks=[PlacementGuard()])

It compares when training begins: the trainer's model with the trainer's own device, in every process. A trainer may
fail before that, while it is made; `placement.check` right after loading finds such a fault earlier.

Upstream: TRL #2760.
"""

from typing import Any

from failurelab import placement, plants
from failurelab.guards.base import Action, Guard


class PlacementGuard(Guard):
    """Stop or warn when a tensor of the model is on another device than the one trained on, before the first step.

    If a device map splits the model on purpose, in one process, only a layer without accelerate's hook for its input is
    a fault. `report` is a `placement.PlacementReport` once training has begun.

    Args:
        action: `stop` raises GuardTripped, `warn` issues a GuardWarning.
    """

    failures = ("F5", "F6")

    def __init__(self, action: Action = "stop"):
        super().__init__(action)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check every tensor of the model once."""
        report = self.report = placement.check(model, args.device)
        figures = {**report.figures, "placement_refused": False}  # else the trainer had not been made
        if found := tuple(id for id in self.failures if self._finds(id, figures)):
            self._trip(str(report), report, found)
            return
        controls = {"tensors on another device": plants.first_gpu(model, args.device)}
        if figures["models_in_4bit"]:
            controls["scales moved to another device"] = plants.scales_moved(model, args.device)
        self._conclude(str(report), [figures], controls)
