"""What a reward function says of itself: its name and the columns that it asks for."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_STANDARD = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
_USUAL = ("answer", "answers", "solution", "ground_truth", "label", "labels", "target", "reference", "expected")
REFERENCES = (*_USUAL, "gold", "final_answer", "correct_answer", "output", "response", "completion")


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
    """Return the columns that a function may ask for: its arguments, and, of its **kwargs, names that it knows."""
    return [name for name in _asked(function) if name not in _STANDARD]


def asks_for(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function asks for this argument, by its name or as a key of its **kwargs."""
    return name in _asked(function)


def _asked(function: Callable[..., Any]) -> list[str]:
    known = parameters(function)
    names = [each.name for each in known if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    plain = plain_function(function)
    code = getattr(plain, "__code__", None)
    if code is not None and any(each.kind is each.VAR_KEYWORD for each in known):
        inside = (value for value in code.co_consts if isinstance(value, types.CodeType))
        texts = [value for part in (code, *inside) for value in part.co_consts]
        texts += inspect.getclosurevars(plain).nonlocals.values()  # by_name("x") returns what asks for kwargs[name]
        names += [text for text in texts if isinstance(text, str) and text.isidentifier()]
    return list(dict.fromkeys(names))


def plain_function(function: Any) -> Any:
    """Return the Python function behind a partial, a decorator, a method, or an object that is called."""
    while hasattr(function, "__wrapped__") or hasattr(function, "func"):
        function = getattr(function, "__wrapped__", None) or function.func
    function = getattr(function, "__func__", function)
    return function if hasattr(function, "__code__") else inspect.getattr_static(type(function), "__call__", function)
