"""Errors of the script's own callbacks, which would end the cut training before it is judged.

A run of three steps has other logs, files and metrics than the whole one, so such an error may be the cut's and not the
script's. It is told, and the training goes on without that call. Of several processes none goes on alone: the error
ends the run, and is told with its rank.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from failurelab.preflight.answer import Finding
from failurelab.preflight.script_text import location, read_source
from failurelab.preflight.stage.own_code import OwnCode

_ANYWHERE = (NameError, ImportError, SyntaxError)  # which come at full length too


@contextlib.contextmanager
def errors_noted(trainer: Any, own: OwnCode) -> Iterator[list[Finding]]:
    """Inside, what a callback of the script's own raises becomes a finding; each callback's event is told once."""
    findings: dict[str, Finding] = {}

    def called(method: Callable[..., Any], name: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
        try:
            return method(args, state, control, **more)
        except Exception as error:
            place, trace = None, error.__traceback__
            while trace is not None:
                file = trace.tb_frame.f_code.co_filename
                if own.holds(file):
                    place = location(file, trace.tb_lineno, read_source(file))
                trace = trace.tb_next
            said = f"{name} raises {type(error).__name__}: {error} ({place}), at step {state.global_step} of the cut"
            if isinstance(error, _ANYWHERE):
                why = "the training was judged without this call, so nothing undid it"
                finding = Finding.suspected("callback", said, why, "Mend that line.", part=name, place=place, ends=True)
            else:
                finding = Finding.not_checked("callback", f"{said}; whether at full length too is not known", part=name)
            findings.setdefault(name, finding)
            return control

    taken: list[Finding] = []
    with contextlib.ExitStack() as stack:
        for callback in trainer.callback_handler.callbacks:
            for event in filter(lambda name: name.startswith("on_"), dir(type(callback))):
                method = getattr(callback, event)
                code = getattr(method, "__code__", None)
                if code is not None and own.holds(code.co_filename) and event not in vars(callback):
                    around = functools.partial(called, method, f"{type(callback).__name__}.{event}")
                    vars(callback)[event] = around
                    stack.callback(vars(callback).pop, event)
        yield taken
    taken += findings.values()
