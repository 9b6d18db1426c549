"""What every guard is: a TrainerCallback that stops the run, or warns, when it finds what it looks for."""

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
    """What guards share: the action, the report, and how they trip."""

    def __init__(self, action: str):
        if action not in ("stop", "warn"):
            raise ValueError(f"unknown action {action!r}: a guard can 'stop' the run or 'warn'")
        self.action = action
        self.report: Any = None

    def _trip(self, message: str, report: Any) -> None:
        text = f"{type(self).__name__}: {message}"
        if self.action == "stop":
            raise GuardTripped(text, report)
        warnings.warn(text, GuardWarning, stacklevel=3)

    def _warn(self, message: str) -> None:
        """Warn whatever the action is: what was found makes the run dear, not wrong."""
        warnings.warn(f"{type(self).__name__}: {message}", GuardWarning, stacklevel=3)
