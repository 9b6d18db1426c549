"""F3b: rows are scored against another token than the next one. F3a, more rows than are asked for, is noted.

Upstream: the registry's F3a and F3b.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from failurelab import guards, logits
from failurelab.handles import is_unseen
from failurelab_preflight.finding import Finding, Quantity
from failurelab_preflight.judges.guarded import Guarded
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.repairs import Statement
from failurelab_preflight.training import Training

LOGITS_REPAIRED = Statement(
    "for each in filter(None, ({trainer}.model, getattr({trainer}, 'ref_model', None))): logits.repair(each)",
    imports="from failurelab import logits",
)


class LogitsJudge:
    """Listens with a LogitsGuard, and notes how many rows of logits are asked for and made in a training pass."""

    def __init__(self, training: Training):
        self._training, self._model = training, training.trainer.model
        self._guarded = Guarded(guards.LogitsGuard, training.trainer)
        self._name = ""  # of the argument that asks for rows
        self._rows_wanted, self._rows_made = 0, 0
        self._whole = 0  # the tokens of the sequence for which the rows were made

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the training is listened to."""
        self._guarded.listen()
        # before hooks of the script, which may divide the logits as a trainer would
        with self._model.register_forward_hook(self._note_rows, with_kwargs=True, prepend=True):
            yield

    def _note_rows(self, model: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if is_unseen() or not torch.is_grad_enabled():
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        rows = getattr(output, "logits", None)
        if not isinstance(rows, torch.Tensor) or rows.dim() != 3:
            return
        for name in logits.NAMES:
            wanted = kwargs.get(name)
            if isinstance(wanted, int) and wanted:
                self._name, self._rows_wanted, self._rows_made = name, wanted, rows.shape[1]
                self._whole = rows.shape[1] if ids is None else ids.shape[1]

    def answers(self) -> Iterator[Finding]:
        """Yield what was seen, after training, or after the error that ended it."""
        report = self._guarded.report
        if self._guarded.found:
            yield self._found_shift(report)
            return
        yield from self._note_memory()
        yield self._judge_scores(report)

    def _found_shift(self, report: Any) -> Finding:
        token = "tokens that do not come next" if report.shift is None else f"the token {report.shift + 1} further on"
        scored = f"{report.scored} rows of logits are scored against {token}, not against the next one"
        if self._rows_made > self._rows_wanted:
            scored += f"; the trainer asks for rows by {self._name}, which this model swallows"
        return Finding(
            "F3b",
            f"{report.probe or scored}. Nothing is raised",
            "failurelab.logits.repair(model) before the trainer is made; or trl 0.15 and later",
            undo=LOGITS_REPAIRED,
            figures=() if report.shift is None else (Quantity("positions_off", report.shift, "positions"),),
        )

    def _note_memory(self) -> Iterator[Finding]:
        if self._rows_made > self._rows_wanted and self._rows_made >= self._whole:  # not what a layer of its own keeps
            yield Finding.noted(
                "F3a",
                f"the trainer asks for {self._rows_wanted} rows of logits by {self._name}, and the model, which "
                f"swallows that name, makes {self._rows_made}: it costs memory",
                "failurelab.logits.repair(model) before the trainer is made, or later releases, end it",
            )

    def _judge_scores(self, report: Any) -> Finding:
        if report is None:
            return Finding.not_checked("F3b", self._guarded.failed or "no gradient of the logits could be read")
        evidence = f"{report.scored} rows of logits are scored against the token that comes next"
        if not report.scored:
            evidence = "the loss is no score of single tokens: no row says for which token it is"
        if not report.made:
            evidence = "the known-answer probe gets the log-probabilities of the completion's tokens"
        found = Finding.not_checked("F3b", self._guarded.failed or evidence)
        return settle("F3b", [report.figures], report.planted, evidence) or found
