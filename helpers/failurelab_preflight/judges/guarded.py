"""What judges of a training share that let a guard listen to it."""

from collections.abc import Callable
from typing import Any

from failurelab import guards


class Guarded:
    """A guard in the cut training, and what it tells: its report, or why it could not look.

    Args:
        guard: makes it, with the action that it is to call.
        trainer: that it listens to.
    """

    def __init__(self, guard: Callable[[Callable[[guards.Notice], None]], Any], trainer: Any):
        self._trainer = trainer
        self._found: Any = None
        self.failed = ""
        self._guard = guard(self._notice)

    def listen(self) -> None:
        """Begin to listen; the training ends it."""
        self._trainer.add_callback(self._guard)

    @property
    def found(self) -> bool:
        """Whether it has found its failure."""
        return self._found is not None

    @property
    def report(self) -> Any:
        """What it measured: where it found its failure, or last; None where it could not look."""
        return self._found or getattr(self._guard, "report", None)

    def _notice(self, notice: guards.Notice) -> None:
        if notice.kind == "found" and not getattr(notice.report, "not_optimized", ()):  # which F23's judge tells
            self._found = notice.report
        elif notice.kind == "not checked":
            self.failed = self.failed or notice.message
