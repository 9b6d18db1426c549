"""The kind `logits`: a trainer, measured as the kind `trainer` is, and which rows of logits its training pass uses.

What goes wrong is in figures that no log shows: rows made and never used (memory), or rows scored against tokens that
do not follow them (silence). Both are read from the gradient of the logits in the first training pass, below the
trainer, so that no name of a trainer's method is relied on (see `logits_guard`).
"""

import types
import warnings
from typing import Any

import torch

from . import measure_trainer
from .guard_base import GuardWarning
from .logits_guard import LogitsGuard
from .measure import Run

_CLOSE = 1e-3  # nats


def measure(script: types.ModuleType, run: Run) -> None:
    """Build the script's trainer, train it, and fill in `run.figures`."""
    run.stage = "build"
    trainer = measure_trainer.built(script, run)
    guard = LogitsGuard(action="warn", waste=float("inf"), growth=float("inf"))
    trainer.add_callback(guard)
    handle = trainer.model.register_forward_hook(_Scores(run), with_kwargs=True)
    run.stage = "train"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GuardWarning)
            measure_trainer.train(trainer, run)
    finally:
        handle.remove()
        report = guard.report
        if report is not None and report.made:
            shift = {} if report.shift is None else {"positions_off": report.shift}
            run.figures |= {"rows_made": report.made, "rows_needed": report.needed} | shift
    run.stage = "measure"
    measure_trainer.after(trainer, run)


class _Scores:
    """Judges a model that answers with log-probabilities in place of logits: it makes no rows at all."""

    def __init__(self, run: Run):
        self.run = run

    def __call__(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        logits = getattr(output, "logits", None)
        ids = kwargs.get("input_ids", args[0] if args else None)
        figures = self.run.figures
        if not torch.is_grad_enabled() or logits is None or logits.shape[-1] != 1 or figures["rows_made"] is not None:
            return
        length, mask = logits.shape[1], kwargs.get("attention_mask")
        with torch.no_grad():  # before the first step the clean model has the same weights
            rows = self.run.clean(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1].log_softmax(-1)
        truth = rows.gather(-1, ids[:, -length:, None])
        counts = torch.ones_like(truth, dtype=torch.bool) if mask is None else mask[:, -length:, None].bool()
        figures |= {"rows_made": 0, "rows_needed": 0}
        if ((logits - truth).abs()[counts] < _CLOSE).all():
            figures["positions_off"] = 0
