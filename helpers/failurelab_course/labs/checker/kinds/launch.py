"""The kind `launch`: a script as it is started once for each device, measured in every way that a trainer can fail.

Each failure of a script hides the next: an error in the first backward pass ends the run before the rows of logits are
read, and a rank that loads on the wrong device is never seen where there is one device. So nothing here waits for
anything else. `build_trainer(model_path, output_dir)` is trained on this machine, as the kind `logits` does; then
`load_model(model_path, rank)` is run as each rank of a simulated node, as the kind `placement` does, also where
training ended in an error.
"""

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import torch

from failurelab._unwrap import unwrap
from failurelab_course.labs.checker.base import CheckRun
from failurelab_course.labs.checker.kinds import logits, placement, trainer

_LOADS = "load_model"


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Train what the script builds, load what its ranks load, and fill in `run.metrics`.

    Raises:
        Refused: one of the two functions is missing, or is about another model.
    """
    run.function(script, f"{_LOADS}(model_path, rank)")
    try:
        trainer.measure(script, run, _watched)
    finally:
        stage = run.stage
        # last, for simulated devices are the accelerator of the whole process from then on
        placement.measure(script, dataclasses.replace(run, trainer_class=_LOADS))
        run.stage = stage


@contextlib.contextmanager
def _watched(trainer: Any, run: CheckRun) -> Iterator[None]:
    """Read rows of logits as the kind `logits` does; where no gradient came to tell them, as they were made."""
    rows = _Rows()
    # generate calls the base model; training calls PEFT's, which calls the base model's forward unheard
    models = {trainer.model, unwrap(trainer.model)}
    hooks = [model.register_forward_hook(rows, with_kwargs=True) for model in models]
    try:
        with logits.watched(trainer, run):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        if run.metrics["rows_made"] is None and rows.made:
            run.metrics |= {"rows_made": rows.made, "rows_needed": rows.needed}


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
