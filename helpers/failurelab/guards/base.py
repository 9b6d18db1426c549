"""What every guard is: a TrainerCallback that stops the run, or warns, when it finds what it looks for."""

import contextlib
import warnings
from typing import Any

from transformers import TrainerCallback


class GuardTripped(RuntimeError):
    """A guard stopped the run; `report` is what it measured."""

    def __init__(self, message: str, report: Any):
        super().__init__(message)
        self.report = report


class GuardWarning(Warning):
    """A guard found what it looks for, and was asked to warn. No UserWarning: those are often silenced as a whole."""


class Guard(TrainerCallback):
    """What guards share: the action, the report, how they trip, and how they stop listening.

    A guard listens with hooks and handles whose removal it gives to `_listening` (an ExitStack). All are removed when
    training ends, or when `_stop` is called.
    """

    def __init__(self, action: str):
        if action not in ("stop", "warn"):
            raise ValueError(f"unknown action {action!r}: a guard can 'stop' the run or 'warn'")
        self.action = action
        self.report: Any = None
        self._listening = contextlib.ExitStack()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening."""
        self._stop()

    def _stop(self) -> None:
        self._listening.close()

    def _trip(self, message: str, report: Any) -> None:
        text = f"{type(self).__name__}: {message}"
        if self.action == "stop":
            raise GuardTripped(text, report)
        warnings.warn(text, GuardWarning, stacklevel=3)

    def _warn(self, message: str) -> None:
        """Warn whatever the action is: the run is slow or large, and its numbers are right."""
        warnings.warn(f"{type(self).__name__}: {message}", GuardWarning, stacklevel=3)
