"""Errors of the script's callbacks and of its trainer's `log`, which would end the cut training before it is judged.

And callbacks that end it by themselves.

A run of three steps has other logs, files and metrics than the whole one, so such an error may be the cut's and not the
script's. It is told, and the training goes on without that call. Of several processes none goes on alone: the error
ends the run, and is told with its rank.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers.trainer_callback import TrainerCallback

from failurelab.handles import keep_random_state, unseen
from failurelab_preflight.finding import Finding
from failurelab_preflight.script_text import location, read_source
from failurelab_preflight.stage.cuts import ALWAYS_AS_GIVEN
from failurelab_preflight.stage.own_code import OwnCode


class Beginning(TrainerCallback):
    """Asks something once: as training begins, behind the callbacks that came before, or where it never began."""

    def __init__(self, ask: Callable[[], None]):
        self._asks = [ask]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask."""
        self.ask()

    def ask(self) -> None:
        """Ask, if it was not asked yet; nothing is drawn by it from the run's random numbers."""
        with keep_random_state(), unseen():
            while self._asks:
                self._asks.pop()()


def _asks_to_stop(values: Sequence[Any]) -> bool:
    """Return whether the control of a callback is among what it gets or gives, and asks that training stops."""
    return any(getattr(value, "should_training_stop", False) is True for value in values)


_ANYWHERE = (NameError, ImportError, SyntaxError)  # which come at full length too


@contextlib.contextmanager
def errors_noted(
    trainer: Any, own: OwnCode, given: Sequence[Any] = (), asked: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[list[Finding]]:
    """Inside, what the script's callbacks raise becomes a finding; each callback's event is told once.

    Its callbacks are those of its own code, and those of a library that it gives. What a library's reads of the
    arguments is what the script has `asked` for: `EarlyStoppingCallback` asserts some of them before the training. A
    `log` of the trainer's own reads numbers that a cut run has not.
    """
    findings: dict[str, Finding] = {}
    cut = as_given = getattr(trainer, "args", None)
    if cut is not None:
        as_given = object.__new__(type(cut))
        vars(as_given).update(vars(cut) | {name: asked[name] for name in ALWAYS_AS_GIVEN if name in asked})

    def called(method: Callable[..., Any], name: str, *args: Any, **more: Any) -> Any:
        library = not own.holds(getattr(getattr(method, "__code__", None), "co_filename", "<"))
        if args and args[0] is cut:
            args = (as_given, *args[1:])
        begins = library and name.endswith(".on_train_begin")  # nothing is trained then that a cut could change
        asked_before = _asks_to_stop(args)
        try:
            result = method(*args, **more)
            if not library and _asks_to_stop((result, *args)) and not asked_before:
                said = f"{name} stops the training at step {trainer.state.global_step} of the cut"
                why = f"{said}; whether the whole one too is not known"
                findings.setdefault(name, Finding.not_checked("callback", why, part=name))
                for control in filter(None, (result, args[2])):
                    control.should_training_stop = False  # the cut one goes on
            return result
        except Exception as error:
            place, trace = None, error.__traceback__
            while trace is not None:
                file = trace.tb_frame.f_code.co_filename
                if own.holds(file):
                    place = location(file, trace.tb_lineno, read_source(file))
                trace = trace.tb_next
            where = f"{f' ({place})' if place else ''}, at step {trainer.state.global_step} of the cut"
            said = f"{name} raises {type(error).__name__}: {error}{where}"
            if isinstance(error, _ANYWHERE) or (begins and isinstance(error, AssertionError)):
                why = "the training was judged without this call, so nothing undid it"
                repair = "Give it the arguments that it asks for, or leave it out." if begins else "Mend that line."
                finding = Finding.suspected("callback", said, why, repair, part=name, place=place, ends=True)
            else:
                finding = Finding.not_checked("callback", f"{said}; whether at full length too is not known", part=name)
            findings.setdefault(name, finding)
            return args[2] if len(args) > 2 else None  # the control of a callback

    taken: list[Finding] = []
    with contextlib.ExitStack() as stack:
        for callback in trainer.callback_handler.callbacks:
            for event in filter(lambda name: name.startswith("on_"), dir(type(callback))):
                method = getattr(callback, event)
                code = getattr(method, "__code__", None)
                its_own = code is not None and own.holds(code.co_filename)
                if (its_own or callback in given or type(callback) in given) and event not in vars(callback):
                    around = functools.partial(called, method, f"{type(callback).__name__}.{event}")
                    vars(callback)[event] = around
                    stack.callback(vars(callback).pop, event)
        log: Any = getattr(trainer, "log", None)
        if own.holds(getattr(getattr(log, "__code__", None), "co_filename", "<")):
            trainer.log = functools.partial(called, log, f"{type(trainer).__name__}.log")
            stack.callback(vars(trainer).pop, "log")
        yield taken
    taken += findings.values()
