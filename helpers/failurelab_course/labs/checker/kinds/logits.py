"""The kind `logits`: a trainer, measured as the kind `trainer` is, and which rows of logits its training pass uses.

What goes wrong is in figures that no log shows: rows made and never used (memory), or rows scored against tokens that
do not follow them (silence). Both are read from the gradient of the logits in the first training pass, below the
trainer, so that no name of a trainer's method is relied on (see `logits_guard`).
"""

import types
import warnings
from typing import Any

import torch

from failurelab.guards.base import GuardWarning
from failurelab.guards.logits import LogitsGuard
from failurelab_course.labs.checker.base import Run
from failurelab_course.labs.checker.kinds import trainer as measure_trainer

_CLOSE = 1e-3  # nats


def measure(script: types.ModuleType, run: Run) -> None:
    """Build the script's trainer, train it, and fill in `run.metrics`."""
    run.stage = "build"
    trainer = measure_trainer.built(script, run)
    guard = LogitsGuard(action="warn", waste=float("inf"), growth=float("inf"))
    trainer.add_callback(guard)
    first = _First(run)
    handle = trainer.model.register_forward_hook(first, with_kwargs=True)
    run.stage = "train"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GuardWarning)
            measure_trainer.train(trainer, run)
    finally:
        handle.remove()
        report = guard.report
        if report is not None and report.made:
            run.metrics |= {"rows_made": report.made, "rows_needed": report.needed}
            if report.shift is not None and first.early is not None:
                run.metrics["positions_off"] = report.shift + first.early
    run.stage = "measure"
    measure_trainer.after(trainer, run)


class _First:
    """Looks at the first training pass, when the clean model still has the same weights.

    The guard takes the rows that it sees for the sequence's last ones. `early` is by how many positions they lie before
    those, found by comparison with the clean model; None if they are no rows of its logits. A model that answers with
    log-probabilities in place of logits makes no rows at all, and is judged here.
    """

    def __init__(self, run: Run):
        self.run, self.early, self.seen = run, None, False

    def __call__(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        logits = getattr(output, "logits", None)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not torch.is_grad_enabled() or logits is None or self.seen:
            return
        self.seen = True
        ids, logits = ids.cpu(), logits.detach().cpu()  # where the clean model is
        mask, returned, length = kwargs.get("attention_mask"), logits.shape[1], ids.shape[1]
        mask = None if mask is None else mask.cpu()
        counts = torch.ones_like(ids) if mask is None else mask
        with torch.no_grad():
            rows = self.run.clean(input_ids=ids, attention_mask=mask).logits

        def same(got: torch.Tensor, truth: torch.Tensor, places: torch.Tensor) -> bool:
            return bool(((got - truth).abs().amax(-1)[places.bool()] < _CLOSE).all())

        if logits.shape[-1] > 1:
            starts = [length - returned - early for early in range(length - returned + 1)]
            fits = (at for at in starts if same(logits, rows[:, at : at + returned], counts[:, at : at + returned]))
            self.early = next((length - returned - at for at in fits), None)
            return
        truth = rows[:, -returned - 1 : -1].log_softmax(-1).gather(-1, ids[:, -returned:, None])
        self.run.metrics |= {"rows_made": 0, "rows_needed": 0}
        if same(logits, truth, counts[:, -returned:]):
            self.run.metrics["positions_off"] = 0
