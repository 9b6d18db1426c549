"""What a reward function says of itself: its name, the columns that it asks for, and the texts that stand in it.

Texts are what completions are made up by, and columns what is handed over: neither is a verdict.
"""

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_STANDARD = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
_USUAL = ("answer", "answers", "solution", "ground_truth", "label", "labels", "target", "reference", "expected")
REFERENCES = (*_USUAL, "gold", "final_answer", "correct_answer", "output", "response", "completion")


def key_of(functions: Sequence[Any], place: int) -> str:
    """Return the stable key of one of a trainer's reward functions: `reward_funcs[1] length_reward`."""
    function = functions[place]
    while isinstance(function, functools.partial):
        function = function.func
    return f"reward_funcs[{place}] {getattr(function, '__name__', type(function).__name__)}"


def weights_of(trainer: Any, count: int) -> list[float]:
    """Return the weight of each of a trainer's `count` reward functions."""
    weights = getattr(trainer, "reward_weights", None)
    return [1.0] * count if weights is None else [float(weight) for weight in weights]


def reference_column(rows: Sequence[Mapping[str, Any]], asked: Sequence[str] = ()) -> str | None:
    """Return the column with the reference answers: one that the reward functions ask for, else by its name."""
    columns = [name for name in rows[0] if name != "prompt"] if rows else []
    known = [name for name in REFERENCES if name in columns]
    wanted = [name for name in known if name in asked] or [
        name for name in columns if name in asked and isinstance(rows[0][name], (str, int, float))
    ]
    return next(iter(wanted or known), None)


def parameters(function: Callable[..., Any], follow_wrapped: bool = True) -> list[inspect.Parameter]:
    """Return the parameters of a function; none where it does not tell them.

    Args:
        function: of a decorated one, those of the function in the decorator.
        follow_wrapped: False for those of the decorator.
    """
    try:
        return list(inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values())
    except (TypeError, ValueError):
        return []


def asked_columns(function: Callable[..., Any]) -> list[str]:
    """Return the columns that a function may ask for: its arguments, and, of its **kwargs, the names in its code."""
    return [name for name in _asked(function) if name not in _STANDARD]


def asks_for(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function asks for this argument, by its name or as a key of its **kwargs."""
    return name in _asked(function)


def _asked(function: Callable[..., Any]) -> list[str]:
    known = parameters(function)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [each.name for each in known if each.kind in kinds]
    code = getattr(plain_function(function), "__code__", None)
    if code is not None and any(each.kind is each.VAR_KEYWORD for each in known):
        inside = (value for value in code.co_consts if isinstance(value, types.CodeType))
        texts = (value for part in (code, *inside) for value in part.co_consts if isinstance(value, str))
        names += [text for text in texts if text.isidentifier()]
    return list(dict.fromkeys(names))


def plain_function(function: Any) -> Any:
    """Return the Python function behind a partial, a decorator, a method, or an object that is called."""
    while hasattr(function, "__wrapped__") or hasattr(function, "func"):
        function = getattr(function, "__wrapped__", None) or function.func
    function = getattr(function, "__func__", function)
    return function if hasattr(function, "__code__") else inspect.getattr_static(type(function), "__call__", function)


def texts(function: Any) -> list[str]:
    """Return the texts and patterns that stand in a function, and in what it calls in its own module."""
    constants = []
    for code, values in _codes(function):
        constants += [*code.co_consts, *values]
    known = getattr(plain_function(function), "__doc__", None)
    constants = [value.pattern if isinstance(value, re.Pattern) else value for value in constants]
    return list(dict.fromkeys(value for value in constants if isinstance(value, str) and value != known))


def reads_json(function: Any) -> bool:
    """Return whether a function names `json`."""
    return any("json" in code.co_names for code, _ in _codes(function))


def _codes(function: Any, depth: int = 3) -> Iterator[tuple[types.CodeType, list[Any]]]:
    """Yield the code of a function, of what is defined in it, and of what it calls in its own module.

    Beside the code stand the values of the names that are from outside.
    """
    instance, function = function, plain_function(function)
    instance = getattr(instance, "__self__", instance)
    if not isinstance(function, types.FunctionType):
        return
    codes, values = [function.__code__], []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that nothing was put into yet
            values.append(cell.cell_contents)
    if instance is not function:
        values += vars(instance).values() if hasattr(instance, "__dict__") else ()
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        values += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        if instance is not function:
            own = (inspect.getattr_static(type(instance), name, None) for name in code.co_names)
            values += [value for value in own if isinstance(value, (types.FunctionType, re.Pattern, str))]
    yield codes[0], values
    for code in codes[1:]:
        yield code, []
    for value in values if depth else ():
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__ and value is not function:
            yield from _codes(value, depth - 1)
