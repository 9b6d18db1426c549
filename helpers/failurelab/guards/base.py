"""What every guard is: a TrainerCallback that stops the run, or warns, when it finds what it looks for."""

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

_log = logging.getLogger("failurelab.guards")


class GuardTripped(RuntimeError):
    """A guard stopped the run; `report` is what it measured."""

    def __init__(self, message: str, report: Any):
        super().__init__(message)
        self.report = report


class GuardWarning(Warning):
    """A guard found what it looks for, and was asked to warn. No UserWarning: those are often silenced as a whole."""


@dataclasses.dataclass(frozen=True)
class Notice:
    """What a guard has to say, for an action that is a function.

    Attributes:
        guard: its class's name.
        kind: `found`, `note` (the run is slow or large, and its numbers are right) or `not checked`.
        message: what the guard would have warned of.
        report: what it measured; None where nothing was found.
    """

    guard: str
    kind: str
    message: str
    report: Any = None


Action = str | Callable[[Notice], None]


class Guard(TrainerCallback):
    """What guards share: the action, the report, how they trip, and how they stop listening.

    The action is `stop`, `warn`, or a function, which is called with a `Notice` in the place of a warning.

    A guard listens with hooks and handles whose removal it gives to `_listening` (an ExitStack). All are removed when
    training ends, or when `_stop` is called. What a guard does for itself runs inside `_check`: every `on_` method of a
    subclass does so by itself, hooks and wrapped methods call it.
    """

    def __init__(self, action: Action):
        if action not in ("stop", "warn") and not callable(action):
            raise ValueError(f"unknown action {action!r}: a guard can 'stop' the run, 'warn', or call a function")
        self.action = action
        self.report: Any = None
        self._failed: set[Any] = set()  # what could not be checked in this run, each said once
        self._listening = contextlib.ExitStack()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if name.startswith("on_"):
                setattr(cls, name, _checked(method))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening."""
        self._check(self._stop)

    def _stop(self) -> None:
        self._listening.close()

    def _trip(self, message: str, report: Any) -> None:
        text = f"{type(self).__name__}: {message}"
        if callable(self.action):
            self.action(Notice(type(self).__name__, "found", message, report))
        elif self.action == "stop":
            raise GuardTripped(text, report)
        else:
            warnings.warn(text, GuardWarning, stacklevel=3)

    def _warn(self, message: str) -> None:
        """Warn also where the action is `stop`: the run is slow or large, and its numbers are right."""
        if callable(self.action):
            self.action(Notice(type(self).__name__, "note", message))
        else:
            warnings.warn(f"{type(self).__name__}: {message}", GuardWarning, stacklevel=3)

    def _check(self, check: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run a check of the guard's own: only what it finds may stop the run, not an error of the check itself.

        An error ends in one GuardWarning for each check and kind of error, however often it comes again.
        """
        try:
            check(*args, **kwargs)
        except (GuardTripped, GuardWarning):
            raise  # found; a warning is raised where the user turned warnings into errors
        except Exception as error:
            if (key := (check.__name__, type(error))) not in self._failed:
                self._failed.add(key)
                self._could_not_check(f"{type(error).__name__}: {error}")

    def _could_not_check(self, reason: str) -> None:
        """Warn that nothing was judged."""
        if callable(self.action):
            self.action(Notice(type(self).__name__, "not checked", reason))
        else:
            self._warn(f"could not check: {reason}")

    def _held(self, message: str) -> None:
        """Say at log level INFO what was checked and held."""
        _log.info("%s: %s", type(self).__name__, message)


def _checked(method: Callable[..., None]) -> Callable[..., None]:
    """Return a callback's method that runs inside `_check`."""

    @functools.wraps(method)
    def checked(self: Guard, *args: Any, **kwargs: Any) -> None:
        if method.__name__ == "on_train_begin":
            self._failed.clear()
        self._check(method, self, *args, **kwargs)

    return checked
