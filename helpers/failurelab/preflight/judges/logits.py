"""F3a: more rows of logits are made than are asked for. F3b: rows are scored against another token than the next one.

Upstream: the registry's F3a and F3b.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch

from failurelab import failures, guards, logits
from failurelab.failures import loader
from failurelab.handles import is_unseen
from failurelab.preflight.answer import Finding, Quantity
from failurelab.preflight.judges.guarded import Guarded
from failurelab.preflight.repairs import Statement
from failurelab.preflight.stage import controls
from failurelab.preflight.training import Training

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
        self._ids: torch.Tensor | None = None  # (batch, tokens) of a training pass
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
        self._ids = ids if isinstance(ids, torch.Tensor) and ids.dim() == 2 else self._ids
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
        if report is not None and (report.probe or (report.scored and report.shift != 0)):
            yield self._found_shift(report)
            return
        yield self._judge_rows(report)
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
            figures=() if report.shift is None else (Quantity("shift of the scored token", report.shift, "tokens"),),
        )

    def _judge_rows(self, report: Any) -> Finding:
        figures = (Quantity("rows of logits", self._rows_made, "rows", self._rows_wanted),)
        if self._rows_wanted < self._rows_made < self._whole:  # a layer of the script's own keeps as many
            rows = f"the last {self._rows_made} of {self._whole} rows of logits"
            return Finding.not_checked("F3a", f"{rows} are made, and {self._rows_wanted} asked for", figures=figures)
        if self._rows_made > self._rows_wanted:
            prompt, kept = (
                self._training.arguments.get(name) or 0 for name in ("max_prompt_length", "max_completion_length")
            )
            full = f"; at full size {(prompt + kept) / kept:.1f} times the memory of logits" if prompt and kept else ""
            return Finding(
                "F3a",
                f"the trainer asks for {self._rows_wanted} rows of logits by {self._name}, and the model, which "
                f"swallows that name, makes {self._rows_made}{full}",
                f"failurelab.logits.repair(model), as in the diff; or {self._versions()}",
                undo=LOGITS_REPAIRED,
                figures=figures,
                mild=True,
            )
        if self._rows_wanted:
            evidence = (
                f"{self._rows_wanted} rows of logits are asked for by {self._name}, and {self._rows_made} are made"
            )
            every = controls.count_all_rows(self._model, self._ids) if self._ids is not None else 0
            if every > self._rows_wanted:
                return Finding.held("F3a", evidence, f"unasked, the model makes {every}", figures=figures)
            return Finding.not_checked("F3a", f"{evidence}; unasked, the model makes no more for this batch")
        if report is None:
            return Finding.not_checked("F3a", "no training pass was seen")
        return Finding.not_applicable("F3a", "the trainer asks for rows by a name that this model takes, or for none")

    def _versions(self) -> str:
        known = f"this model takes {logits.keep_argument(self._model) or 'no argument'}"
        return versions_that_fit("F3a") or f"versions that fit: {known}"

    def _judge_scores(self, report: Any) -> Finding:
        if report is None:
            return Finding.not_checked("F3b", self._guarded.failed or "no gradient of the logits could be read")
        if report.scored:
            evidence = f"{report.scored} rows of logits are scored against the token that comes next"
            if self._ids is not None and controls.sees_shifted_scores(self._model, self._ids):
                return Finding.held("F3b", evidence, "scored against the one after that, they are seen to be off")
            return Finding.not_checked("F3b", f"{evidence}; scored against the one after that, it looks the same")
        if report.made:
            return Finding.not_checked(
                "F3b", "the loss is no score of single tokens: no row says for which token it is"
            )
        return Finding.held(
            "F3b",
            "the known-answer probe gets the log-probabilities of the completion's tokens",
            f"with the nearest known mistake they would differ by {report.contrast:.2f}",
        )


def versions_that_fit(failure: str) -> str:
    """Return the upgrades that end a failure with the versions here; empty where the registry knows none."""
    installed = {}
    for package in loader.PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    upgrades = failures.upgrades(failures.get(failure), installed)
    return f"versions that fit: {'; or '.join(upgrades)}" if upgrades else ""
