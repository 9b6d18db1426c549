"""The kind `launch`: a script as it is started once for each device, measured in every way that a trainer can fail.

Each failure of a script hides the next: an error in the first backward pass ends the run before the rows of logits are
read, and a rank that loads on the wrong device is never seen where there is one device. So nothing here waits for
anything else. `build_trainer(model_path, output_dir)` is trained on this machine, as the kind `logits` does; then
`load_model(model_path, rank)` is run as each rank of a simulated node, as the kind `placement` does, also where
training ended in an error.
"""

import dataclasses
import types
from typing import Any

import torch

from failurelab._unwrap import unwrap
from failurelab_course.labs.checker.base import Run
from failurelab_course.labs.checker.kinds import logits as measure_logits
from failurelab_course.labs.checker.kinds import placement as measure_placement

_LOADS = "load_model"


def measure(script: types.ModuleType, run: Run) -> None:
    """Train what the script builds, load what its ranks load, and fill in `run.metrics`.

    Raises:
        Refused: one of the two functions is missing, or is about another model.
    """
    run.function(script, f"{_LOADS}(model_path, rank)")
    rows = _Rows()
    watched = _Watched(script, rows)
    try:
        measure_logits.measure(watched, run)
    finally:
        if run.metrics["rows_made"] is None and rows.made:
            run.metrics |= {"rows_made": rows.made, "rows_needed": rows.needed}
        stage = run.stage
        # last, for simulated devices are the accelerator of the whole process from then on
        measure_placement.measure(script, dataclasses.replace(run, trainer_class=_LOADS))
        run.stage = stage


class _Rows:
    """Counts rows of logits in the first training pass, where no gradient is needed to count them."""

    def __init__(self) -> None:
        self.prompt = self.made = self.needed = 0

    def __call__(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self.made or not isinstance(ids, torch.Tensor):
            return
        if not torch.is_grad_enabled():
            self.prompt = self.prompt or ids.shape[1]  # the first pass of generation reads the prompt
            return
        logits = getattr(output, "logits", None)
        if self.prompt and logits is not None and logits.shape[-1] > 1:
            self.made, self.needed = logits.shape[1], ids.shape[1] - self.prompt + 1


class _Watched:
    """The script, whose trainer's model is listened to from the moment it is built."""

    def __init__(self, script: types.ModuleType, rows: _Rows) -> None:
        self._script, self._rows = script, rows

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._script, name)
        if name != "build_trainer":
            return attribute

        def build_trainer(*args: Any, **kwargs: Any) -> Any:
            trainer = attribute(*args, **kwargs)
            model = getattr(trainer, "model", None)
            if isinstance(model, torch.nn.Module):
                # generate calls the base model; training calls PEFT's, which calls the base model's forward unheard
                for module in {model, unwrap(model)}:
                    module.register_forward_hook(self._rows, with_kwargs=True)
            return trainer

        return build_trainer
