"""A guard for steps that are not the algorithm's: the trainer's gradient beside the textbook's.

    trainer.add_callback(guards.StepGuard(trainer))

All other guards look for one known failure each. This one takes the tokens that were drawn and the rewards that were
returned, computes the gradient of GRPO, RLOO or Online DPO by its definition (see `failurelab.textbook`), and compares
it with the trainer's own before it is clipped. A wrong sign, a mask shifted by one, advantages of other rows and a loss
divided by the wrong number raise nothing, and their curves look healthy. Where weights of rows explain the difference,
it prints those that the trainer gave beside those of the definition.
"""

import functools
import weakref
from collections.abc import Mapping
from typing import Any

from failurelab import textbook
from failurelab.failures import verdicts
from failurelab.guards.base import Guard
from failurelab.handles import keep_random_state
from failurelab.textbook.ranks import RanksApart


class StepGuard(Guard):
    """Warn or stop when an optimizer step's gradient is not that of its algorithm.

    Of several processes each needs one; what it says is the same on all, and rank 0 says it.
    In the first step that is compared mistakes are planted in the textbook, at the price of some six more passes: what
    would not show is not held. It changes nothing in the run: weights, random state and rewards are those of a run
    without it. `report` is the last `textbook.Comparison`. What a step cannot show, such as the KL term while the
    policy is still its reference, is said at log level INFO, and stands in `report.not_shown`.

    Args:
        trainer: the trainer that it is added to; callbacks are not given it.
        action: `warn` issues a GuardWarning, `stop` raises GuardTripped.
        every: compare at the first optimizer step, and then at every step whose number this divides; None: the first.
        suspects: look for what explains a wrong gradient, at the price of some five more passes, once.
    """

    failures = ("F21",)

    def __init__(
        self,
        trainer: Any,
        action: str = "warn",
        *,
        every: int | None = None,
        suspects: bool = True,
    ):
        super().__init__(action)
        if every is not None and every < 1:
            raise ValueError(f"every={every}: at least one step lies between two comparisons")
        self.every, self.suspects = every, suspects
        self._trainer = weakref.ref(trainer)
        self._recorder: textbook.Recorder | None = None
        self._controls: Mapping[str, verdicts.Figures] = {}  # of the first step that showed them
        self._first = 1

    def _wanted(self, step: int) -> bool:
        return step == self._first or (self.every is not None and step % self.every == 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start to listen."""
        self._stop()
        self.report, self._recorder, self._controls = None, None, {}
        trainer = self._trainer()
        reasons = textbook.why_not_here(trainer)
        if reasons:
            self._could_not_check("; ".join(reasons))
            return
        self._first = state.global_step + 1
        recorder = textbook.recorder_of(trainer, self._wanted)
        self._listening.callback(recorder.detach)
        recorder.attach()
        try:
            recorder.begin(functools.partial(self._check, self._compare))
        except RanksApart as error:  # by this rank too, which may be the only one with a guard
            self._stop()
            self._could_not_check(str(error))
            return
        self._recorder = recorder

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare, where no engine has stepped by itself."""
        if self._recorder is not None and self._recorder.engine is None:
            self._compare()

    def _compare(self) -> None:
        trainer = self._trainer()
        if self._recorder is None or trainer is None or not self._wanted(trainer.state.global_step + 1):
            return
        evidence = self._recorder.evidence()
        ranks = evidence.ranks
        with keep_random_state():
            planted = not self._controls
            report = textbook.compare_step(trainer, evidence, with_suspects=self.suspects, with_controls=planted)
        self.report, self._controls = report, self._controls or report.planted
        if ranks.number and self.action != "stop" and not ranks.split:
            self._has_said = True  # the same, by rank 0
            return
        for line in report.not_shown:
            self._nothing_to_check(f"step {report.step}, NOT CHECKED: {line}")
        found = [report.reason] * bool(self._finds("F21", report.figures)) + [report.texts] * bool(report.texts)
        if found:
            table = f"\n{report.table}" if report.table else ""
            self._trip(f"step {report.step}: {'; '.join(found)}{table}", report)
        elif report.apart is not None:
            self._conclude(f"step {report.step}: {report.reason}", [report.figures], self._controls)
        else:
            self._could_not_check(f"step {report.step}: {report.reason}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the step, or stop listening where no other is to be compared."""
        if self._recorder is not None:
            self._recorder.next_step()
            if self.every is None:
                self._recorder = None
                self._stop()
