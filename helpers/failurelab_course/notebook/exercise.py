"""An exercise in a notebook: the reader writes the measurement that decides, and `check` says what it misses.

The cell before has a function's signature, and a docstring that says what it returns. The checker asks the course's
own solution first, so that a checker which nobody can satisfy is an error, then the reader's function. A run by
papermill or nbval meets the function unwritten, and goes on with the solution.
"""

import contextlib
import html
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from failurelab.errors import FailureLabError
from failurelab_course.notebook import display as notebook
from failurelab_course.notebook import predict

DONE = notebook.Mark("✓ all cases", "#d5f2de", "#0b3d1c")
OPEN = notebook.Mark("not yet", "#fdeacb", "#4a2f00")


class ExerciseError(FailureLabError):
    """The course's own solution does not satisfy its checker; the message names the case."""


class Example(NamedTuple):
    """One call of what the reader wrote. A notebook writes it as a plain tuple.

    Attributes:
        what: the call in words, such as "two equal models".
        given: the arguments, or a function without arguments that makes them anew for each call.
        expected: what is returned: compared by ==, numbers within a thousandth, also those in a tuple; a tensor by
            shape, and its numbers within a ten-thousandth. Or a function that takes what was returned and returns
            whether it is right.
        hint: what an answer that fails here has missed, in a sentence.
        shown: where `expected` is a function, what is right, to be shown to an answer that fails: a value, or a text.
    """

    what: str
    given: Sequence[Any] | Callable[[], Sequence[Any]]
    expected: Any
    hint: str
    shown: Any = None


def check(
    written: Callable[..., Any], solution: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> Callable[..., Any]:
    """Show how far the reader's function is right; return it if it is, else the course's solution.

    A function that was not written (it returns None or `...` in the first call), that raises, or that returns another
    type is told in a line, and the notebook runs on.

    Args:
        written: the reader's function.
        solution: the course's.
        calls: examples, or tuples of what these hold, from the plain one to the one that most answers miss.

    Raises:
        ExerciseError: the solution fails a call, and nobody looks. A reader is told so in a line.
    """
    calls = [Example(*call) for call in calls]
    for call in calls:
        if problem := _try(solution, call):
            problem = f"the course's own {solution.__name__} fails at “{call.what}”: {problem}"
            if not predict.is_interactive():
                raise ExerciseError(problem)
            return _go_on_with(solution, f"this cannot be checked here, for {problem}.")
    for own, told in _given:
        if own is written:  # this cell runs again, and the course's own has the reader's name by now
            return _go_on_with(solution, told)
    name = getattr(written, "__name__", "the function")
    if not callable(written):
        return _go_on_with(solution, f"`{name}` is {type(written).__name__}, and a function is expected.")
    for passed, call in enumerate(calls):
        problem = _try(written, call)
        if problem is _UNWRITTEN and not passed:
            return _go_on_with(solution, f"`{name}` is not written yet: the notebook goes on with the course's own.")
        if problem:
            return _go_on_with(solution, f"{passed} of {len(calls)} cases. At “{call.what}” {problem}. {call.hint}")
    _tell(True, f"`{name}` is right in all {len(calls)} cases.")
    return written


def _go_on_with(solution: Callable[..., Any], sentence: str) -> Callable[..., Any]:
    """Tell the reader why the notebook goes on with the course's solution; return that, and keep the sentence."""
    _tell(False, sentence)
    _given.append((solution, sentence))
    return solution


_given: list[tuple[Callable[..., Any], str]] = []  # solutions that a notebook goes on with, and why


_UNWRITTEN = "it returned nothing"


def _try(function: Callable[..., Any], call: Example) -> str:
    """Return what is wrong with a function in a case; an empty text if nothing is."""
    given = call.given() if callable(call.given) else call.given
    try:
        returned = function(*given)
    except (Exception, SystemExit) as error:  # a kernel that meets `exit()` in a cell ends
        said = (str(error).strip().splitlines() or ["no word"])[0]
        return f"it raised {type(error).__name__}: {said[:160]}"
    if returned is None or returned is ...:
        return _UNWRITTEN
    if callable(call.expected):
        try:
            right = bool(call.expected(returned))
        except Exception:
            right = False
        wanted = call.shown if isinstance(call.shown, str) else _short(call.shown)
        told = f"it returned {_short(returned)}" + (f", and {wanted} is right" if call.shown is not None else "")
        return "" if right else told
    told = f"it returned {_short(returned)}, and {_short(call.expected)} is right"
    with contextlib.suppress(Exception):  # another type, or another shape
        return "" if _same(returned, call.expected) else told
    return told


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if hasattr(expected, "isclose"):  # a tensor
        return value.shape == expected.shape and bool(value.isclose(expected, rtol=1e-4, atol=1e-4).all())
    if hasattr(value, "item"):  # a scalar of an array library is a number
        value = value.item()
    if isinstance(expected, bool) or not isinstance(expected, (int, float)):
        return bool(value == expected)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isclose(value, expected, rel_tol=1e-3, abs_tol=1e-6)


def _short(value: Any) -> str:
    if getattr(value, "shape", None) == ():
        value = value.item()
    text = f"{value:.4g}" if isinstance(value, float) else repr(value)
    kind = "" if isinstance(value, (int, float)) else f" ({type(value).__name__})"
    return " ".join(text.split())[:80] + kind


def _tell(done: bool, sentence: str) -> None:
    mark = DONE if done else OPEN
    text = f"{mark.words}: {sentence}"
    notebook._display({"text/plain": text, "text/html": f"{mark.html} {html.escape(sentence, quote=False)}"}, {})
