"""Compare steps of a trainer from outside: attached before `train()`, taken back at the end of the block."""

import contextlib
from collections.abc import Sequence
from typing import Any

from transformers.trainer_callback import TrainerCallback

from failurelab.textbook.algorithms import no_textbook
from failurelab.textbook.comparison import Comparison, compare_step
from failurelab.textbook.queued import recorder_of
from failurelab.textbook.ranks import RanksApart
from failurelab.textbook.recorder import Recorder


class Watch(TrainerCallback):
    """Compares the gradients of some optimizer steps; `reports` has one Comparison for each.

    Args:
        trainer: one that does not train yet, of an algorithm that there is a definition of.
        steps: numbers of the optimizer steps, from 1.
        with_suspects: look for what explains a gradient that is wrong.
    """

    def __init__(self, trainer: Any, steps: Sequence[int] = (1,), *, with_suspects: bool = True):
        self.trainer, self.steps = trainer, frozenset(steps)
        self.with_suspects = with_suspects
        self.reports: list[Comparison] = []
        self._recorder: Recorder | None = None
        self._attached = contextlib.ExitStack()

    @property
    def report(self) -> Comparison:
        """The last comparison; NOT CHECKED where no step was reached."""
        return self.reports[-1] if self.reports else Comparison("NOT CHECKED", "no step of those was reached")

    def __enter__(self) -> "Watch":
        reason = no_textbook(self.trainer)
        if reason is not None:
            self.reports.append(Comparison("NOT CHECKED", reason))
            return self
        self._recorder = recorder_of(self.trainer, self.steps.__contains__)
        self._recorder.attach()
        self.trainer.add_callback(self)
        self._attached.callback(self._recorder.detach)
        self._attached.callback(self.trainer.remove_callback, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._attached.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Meet the other processes."""
        if self._recorder is not None:
            try:
                self._recorder.begin(self._compare)
            except RanksApart as error:
                self.reports.append(Comparison("NOT CHECKED", str(error)))
                self._recorder.detach()
                self._recorder = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare, where no engine has stepped by itself."""
        if self._recorder is not None and self._recorder.engine is None:
            self._compare()

    def _compare(self) -> None:
        if self._recorder is not None and self.trainer.state.global_step + 1 in self.steps:
            evidence = self._recorder.evidence()
            self.reports.append(compare_step(self.trainer, evidence, with_suspects=self.with_suspects))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the step."""
        if self._recorder is not None:
            self._recorder.next_step()


compare = Watch  # `with textbook.compare(trainer) as comparison: trainer.train()`
