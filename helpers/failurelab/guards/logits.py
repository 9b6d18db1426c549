"""A guard for both failures of the logits argument: unused rows of logits, and tokens scored at other positions.

    trainer = GRPOTrainer(..., callbacks=[LogitsGuard()])

It needs no help from the trainer: the gradient of the logits shows what the trainer did with them. A row without a
gradient was not used. Where a token was scored by log-softmax, the gradient of its row has one entry of one sign, for
the scored token, and all others of the other sign. So the guard reads which token each row was scored against, and
compares it with the token that follows in the input. Trainers that get log-probabilities instead of logits (trl from
1.15 on) are tested by the known-answer probe.

Upstream: TRL #2770 (swallowed argument), #2773 (all rows made, then cut).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from failurelab import plants
from failurelab.failures.predicates import Value
from failurelab.guards.base import Action, Guard
from failurelab.logits import NAMES, keep_argument, kept_rows
from failurelab.measure.alignment import MisalignedLogProbs, check_alignment
from failurelab.measure.scores import ScoredRows, read_scored_rows

_WASTE = 1.5  # times as many rows made as used are told


@dataclasses.dataclass(frozen=True)
class LogitsReport(ScoredRows):
    """What the first judged backward pass, or the probe, showed; without rows where log-probabilities were returned.

    Attributes:
        probe: the message of `check_alignment`; "" if all is right or it was not asked.
        contrast: how far the nearest known mistake is from the truth, in nats, says the probe; 0 if it was not asked.
        measured: the probe's figures, where it was asked.
        planted: what the same gradient says beside ids that are moved by one, or the probe of the nearest mistake.
    """

    probe: str = ""
    contrast: float = 0.0
    measured: Mapping[str, Value] = dataclasses.field(default_factory=dict, compare=False)
    planted: Mapping[str, Mapping[str, Value]] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def figures(self) -> dict[str, Value]:
        """What the registry's F3b is about."""
        return dict(self.measured) or super().figures


class LogitsGuard(Guard):
    """Stop when log-probabilities are another token's; warn when most logits go unused.

    Each at most once in a run. Only the first backward pass with a gradient to read is read; `report` is then a
    `LogitsReport`, and None if no pass could be read.

    Args:
        action: `stop` raises GuardTripped before the optimizer's step when tokens are scored at other positions;
            `warn` issues a GuardWarning. Waste only ever warns: the numbers are right.
    """

    failures = ("F3b",)

    def __init__(self, action: Action = "stop"):
        super().__init__(action)
        self._model: Any = None
        self._begin()

    def _begin(self) -> None:
        self._asked: str | None = None
        self._fused = self._judged = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start to listen to the model's forward."""
        self._stop()
        self._begin()
        self.report, self._model = None, model
        self._temperature = getattr(args, "temperature", None) or 1.0
        hook = model.register_forward_hook(lambda _, *called: self._check(self._listen, *called), with_kwargs=True)
        self._listening.callback(hook.remove)

    def _listen(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return  # generation, or the reference model
        ids = kwargs.get("input_ids", args[0] if args else None)
        logits = getattr(output, "logits", None)
        if isinstance(ids, torch.Tensor) and isinstance(logits, torch.Tensor):
            whole = logits.dim() == 3 and logits.shape[1] <= ids.shape[1]
            if whole and logits.requires_grad and logits.shape[2] > 1:  # one column: completion_logps, no logits
                fewer = logits.shape[1] < ids.shape[1]
                self._asked = next((name for name in NAMES if fewer and isinstance(kwargs.get(name), int)), self._asked)
                logits.register_hook(lambda gradient: self._check(self._read, gradient, ids))
        elif isinstance(getattr(output, "log_probs", None), torch.Tensor) and "labels" in kwargs:
            self._fused = True  # judged when this forward has ended

    def _read(self, gradient: torch.Tensor, ids: torch.Tensor) -> None:
        """Read which rows were used, and against which token each was scored.

        `gradient` is that of the logits, (batch, rows, vocabulary); `ids` are (batch, tokens).
        """
        if self.report is None and (rows := read_scored_rows(gradient, ids)):
            planted = {"rows moved by one": plants.rows_moved(gradient, ids)}
            self.report = LogitsReport(**vars(rows), planted=planted)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge what was read, before the optimizer's step."""
        if self._judged or not (self.report or self._fused):
            return
        self._judged = True
        self._stop()
        if self._fused:
            self._probe()
            return
        report = self.report
        if report.shift == 0 and self._asked and kept_rows(self._model, self._asked) == "other":
            report = self.report = dataclasses.replace(report, shift=None)  # the model returned rows of other positions
        if report.made > _WASTE * report.needed:
            size = report.size / 2**20
            self._warn(
                f"the model makes {report.made} rows of logits for each sequence where {report.needed} are used: "
                f"{size:.1f} MiB instead of {size * report.needed / report.made:.1f}. {self._cure()}"
            )
        if self._finds("F3b", report.figures):
            target = "tokens that do not come next"
            if report.shift is not None:
                target = f"the token {report.shift + 1} further on" if report.shift + 1 else "the token just read"
            self._trip(
                f"rows of logits are scored against {target}, not against the next one ({report.scored} rows read). "
                "These log-probabilities are not the completion's; policy and reference are wrong alike, so nothing is "
                "raised and KL starts at 0. Most often the model returned more rows than were asked for, or others. "
                f"{self._cure()}",
                report,
            )
        elif report.made <= _WASTE * report.needed:
            message = f"{report.scored} rows of logits are scored against the next token"
            if not report.scored:
                message = f"{report.needed} of {report.made} rows of logits are used; no row says for which token"
            self._conclude(message, [report.figures], report.planted)

    def _cure(self) -> str:
        """Return what to do; which name the model takes is asked only where something was found."""
        repair = ""
        try:
            argument = keep_argument(self._model)
            name = f"This model takes {argument or 'no argument'} for that and swallows other names. "
            if argument:
                repair = "failurelab.logits.repair(model) before the trainer is made, "
        except Exception as error:  # what was found is told all the same
            name = f"(By which name this model is asked for fewer could not be found: {type(error).__name__}.) "
        return f"{name}Next: versions that fit, {repair}or failurelab.logits.completion_logps."

    def _probe(self) -> None:
        try:
            alignment = check_alignment(_fused_scores, self._model, temperature=self._temperature)
        except MisalignedLogProbs as error:
            self.report = LogitsReport(probe=str(error))
            self._trip(str(error), self.report)
        else:
            planted = {"the nearest known mistake": {"log_prob_error": alignment.contrast}}
            self.report = LogitsReport(contrast=alignment.contrast, measured=alignment.figures, planted=planted)
            message = "log-probabilities are those of the completion's tokens, says the known-answer probe"
            self._conclude(message, [alignment.figures], planted)


def _fused_scores(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return what trl's fused head returns (trl 1.15 and later)."""
    labels = ids.clone()
    labels[:, :-length] = -100
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    scores: torch.Tensor = output.log_probs[:, -length:]
    return scores
