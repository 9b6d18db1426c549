"""What every guard is: a TrainerCallback that stops the run, or warns, when it finds what it looks for.

What the guards of a run measured is left in its output folder, `failurelab.json`, which `failurelab diagnose` reads: a
line for each notice, of kind `found`, `note`, `not checked`, `held`, or `n/a`, where there was nothing to check.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.trainer_callback import TrainerCallback

from failurelab import failures
from failurelab.errors import raises_own
from failurelab.failures import verdicts
from failurelab.handles import is_unseen

REPORT = "failurelab.json"
_log = logging.getLogger("failurelab.guards")
_runs: dict[pathlib.Path, tuple[weakref.ref[Any], list[dict[str, Any]]]] = {}  # a file's run, and what it holds


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
        failures: of the registry, of which what was found is one.
    """

    guard: str
    kind: str
    message: str
    report: Any = None
    failures: tuple[str, ...] = ()


Action = str | Callable[[Notice], None]


class Guard(TrainerCallback):
    """What guards share: the action, the report, how they trip, and how they stop listening.

    The action is `stop`, `warn`, or a function, which is called with a `Notice` in the place of a warning.

    A guard listens with hooks and handles whose removal it gives to `_listening` (an ExitStack). All are removed when
    training ends, or when `_stop` is called. What a guard does for itself runs inside `_check`: every `on_` method of a
    subclass does so by itself, hooks and wrapped methods call it. `failures` are the ids of what it may find.
    """

    failures: tuple[str, ...] = ()

    def __init__(self, action: Action):
        if action not in ("stop", "warn") and not callable(action):
            raise ValueError(f"unknown action {action!r}: a guard can 'stop' the run, 'warn', or call a function")
        self.action = action
        self.report: Any = None
        self._failed: set[Any] = set()  # what could not be checked in this run, each said once
        self._has_said = False  # anything in this run
        self._listening = contextlib.ExitStack()
        self._file: pathlib.Path | None = None  # where the run's report lies; None outside a run

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if name.startswith("on_"):
                setattr(cls, name, _checked(method))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening; a guard that has said nothing had nothing to check."""
        self._check(self._stop)
        if not self._has_said:
            self._nothing_to_check("what it looks at did not occur in this run")

    def _stop(self) -> None:
        self._listening.close()

    def _trip(self, message: str, report: Any, failures: tuple[str, ...] = ()) -> None:
        if self.action == "stop":
            self._leave("found", message, failures)
            raise GuardTripped(f"{type(self).__name__}: {message}", report)
        self._notify("found", message, report, failures or self.failures)

    def _warn(self, message: str) -> None:
        """Warn also where the action is `stop`: the run is slow or large, and its numbers are right."""
        self._notify("note", message)

    def _could_not_check(self, reason: str) -> None:
        """Warn that nothing was judged."""
        self._notify("not checked", reason)

    def _notify(self, kind: str, message: str, report: Any = None, failures: tuple[str, ...] = ()) -> None:
        """Call the action with a notice if it is a function, else warn."""
        self._leave(kind, message, failures)
        if callable(self.action):
            self.action(Notice(type(self).__name__, kind, message, report, failures))
        else:
            text = f"could not check: {message}" if kind == "not checked" else message
            warnings.warn(f"{type(self).__name__}: {text}", GuardWarning, stacklevel=4)

    def _check(self, check: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run a check of the guard's own: only what it finds may stop the run, not an error of the check itself.

        An error ends in one GuardWarning for each check and kind of error, however often it comes again; in tests it is
        raised (`errors.raises_own`).
        """
        try:
            if not is_unseen():
                check(*args, **kwargs)
        except (GuardTripped, GuardWarning):
            raise  # found; a warning is raised where the user turned warnings into errors
        except Exception as error:
            if raises_own(error):
                raise
            if (key := (check.__name__, type(error))) not in self._failed:
                self._failed.add(key)
                own = "Next: " in str(error)  # an error of this house says what to do; its type adds nothing
                self._could_not_check(str(error) if own else f"{type(error).__name__}: {error}")

    def _held(self, message: str, failures: tuple[str, ...] = ()) -> None:
        """Say at log level INFO what was checked and held, of all that the guard looks for or of these failures."""
        self._log("held", message, failures)

    def _finds(self, id: str, figures: verdicts.Figures, mechanism: str = "") -> verdicts.Judgement | None:
        """Return what the registry says of figures in which it finds a failure; None where it does not."""
        judged = verdicts.judge(failures.get(id), [figures])
        found = judged.verdict == verdicts.FOUND and mechanism in ("", judged.mechanism)
        return judged if found else None

    def _conclude(
        self,
        message: str,
        places: Sequence[verdicts.Figures],
        controls: Mapping[str, verdicts.Figures],
        ids: Sequence[str] = (),
    ) -> None:
        """Leave what the registry says of failures that were not found: held, or what was missing to say so."""
        verdict_of = {id: verdicts.judge(failures.get(id), places, controls) for id in ids or self.failures}
        held = tuple(id for id, judged in verdict_of.items() if judged.verdict == verdicts.HELD)
        if held:
            self._held(message, held)
        for id, judged in verdict_of.items():
            if judged.verdict in (verdicts.NOT_CHECKED, verdicts.FOUND):  # of too little to be told as found
                self._not_seen(f"{message}; {id} is not checked: {judged.missing or judged.says}", (id,))
        if not held and all(judged.verdict == verdicts.NOT_APPLICABLE for judged in verdict_of.values()):
            self._nothing_to_check(message)

    def _not_seen(self, message: str, ids: tuple[str, ...]) -> None:
        """Say at log level INFO what this run could not have shown: nothing is wrong with it by that."""
        self._log("not checked", message, ids)

    def _nothing_to_check(self, message: str) -> None:
        """Say at log level INFO that nothing was checked, because there was nothing that could fail, or show it."""
        self._log("n/a", message)

    def _log(self, kind: str, message: str, failures: tuple[str, ...] = ()) -> None:
        self._leave(kind, message, failures)
        _log.info("%s: %s", type(self).__name__, message)

    def _begin_report(self, args: Any, state: Any) -> None:
        """Know where the run's report lies: one process writes it, and a new run begins it anew."""
        folder = getattr(args, "output_dir", None)
        self._file = None
        if folder is not None and getattr(state, "is_world_process_zero", False):
            self._file = pathlib.Path(folder) / REPORT
        if self._file is not None:
            run, _ = _runs.get(self._file, (None, None))
            if run is None or run() is not state:
                _runs[self._file] = weakref.ref(state), []

    def _leave(self, kind: str, message: str, failures: tuple[str, ...] = ()) -> None:
        """Write into the run's report; a folder that cannot be written is one warning and ends nothing."""
        self._has_said = True
        if self._file is None:
            return
        notices = _runs[self._file][1]
        notice = {"guard": type(self).__name__, "kind": kind, "message": message}
        notices.append(notice | {"failures": list(failures or self.failures)})
        try:
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps({"notices": notices}, indent=1), encoding="utf-8")
            part.replace(self._file)
        except OSError as error:
            path, self._file = self._file, None
            warnings.warn(f"{type(self).__name__}: {path} cannot be written: {error}", GuardWarning, stacklevel=3)


def _checked(method: Callable[..., None]) -> Callable[..., None]:
    """Return a callback's method that runs inside `_check`."""

    @functools.wraps(method)
    def checked(self: Guard, *args: Any, **kwargs: Any) -> None:
        if method.__name__ == "on_train_begin":
            self._failed.clear()
            self._has_said = False
            self._check(self._begin_report, *args[:2])
        self._check(method, self, *args, **kwargs)

    return checked
