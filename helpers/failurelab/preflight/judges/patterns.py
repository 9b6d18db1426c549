"""Texts that a function's own patterns find an answer in: what a reward function asks for is written in it.

forms(reward, "42")  # for re.search(r"<answer>(.*?)</answer>", text): a form that writes <answer>42</answer>
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

try:
    from re import _parser as parser
except ImportError:  # Python 3.10
    import sre_parse as parser

_FORMS = 8
_FILL = "Let me think"


def forms(function: Callable[..., Any], answer: str) -> list[Callable[[str], str]]:
    """Return functions that write an answer as `function` reads it, at most eight.

    Its regular expressions and texts are taken from its code and from the functions of its module that it calls. A
    regular expression counts where it finds `answer` in what is written for it.
    """
    texts = dict.fromkeys(_texts(function, 3))
    written: list[Callable[[str], str]] = []
    for pattern in texts:
        for group in _groups(pattern):
            write = functools.partial(_write, pattern, group)
            match = re.search(pattern, write(answer), re.DOTALL)
            if match and (match[group] or "").strip() == answer:
                written.append(write)
    tags = [text[1:-1] for text in texts if re.fullmatch(r"<\w+>", text)]
    if tags:
        before = "".join(f"<{tag}>{_FILL}</{tag}>" for tag in tags[:-1])
        written.append(lambda answer: f"{before}<{tags[-1]}>{answer}</{tags[-1]}>")
    for text in texts:
        if len(text) <= 30 and re.search(r"[:#=]\s*$|\bis\s*$", text):
            written.append(_after(text))
    return written[:_FORMS]


def _after(text: str) -> Callable[[str], str]:
    return lambda answer: f"{text.rstrip()} {answer}"


def _texts(function: Any, depth: int) -> Iterator[str]:
    """Yield the string constants and compiled patterns of a function, and of what it calls in its own module."""
    while hasattr(function, "__wrapped__") or hasattr(function, "func"):
        function = getattr(function, "__wrapped__", None) or function.func
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        function = inspect.getattr_static(type(function), "__call__", None)
        if not isinstance(function, types.FunctionType):
            return
    names: list[str] = []
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names += code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                codes.append(constant)
            elif isinstance(constant, str):
                yield constant
    cells = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
    for value in [*(function.__globals__.get(name) for name in names), *cells.values()]:
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
            yield value.pattern
        elif isinstance(value, str):
            yield value
        elif isinstance(value, types.FunctionType) and depth and value.__module__ == function.__module__:
            yield from _texts(value, depth - 1)


def _groups(pattern: str) -> range:
    try:
        return range(1, re.compile(pattern).groups + 1) if "(" in pattern else range(0)
    except (re.error, RecursionError):
        return range(0)


def _write(pattern: str, group: int, answer: str) -> str:
    """Return a text that a pattern matches, with `answer` in one of its groups."""
    return _part(parser.parse(pattern), group, answer)


def _part(tokens: Any, group: int, answer: str) -> str:
    return "".join(_token(str(kind), value, group, answer) for kind, value in tokens)


def _token(kind: str, value: Any, group: int, answer: str) -> str:
    if kind == "LITERAL":
        return chr(value)
    if kind == "SUBPATTERN":
        return answer if value[0] == group else _part(value[-1], group, answer)
    if kind == "BRANCH":
        return _part(value[1][0], group, answer)
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        low, high, inner = value
        once = _part(inner, group, answer)
        if low == 0 and len(inner) == 1 and str(inner[0][0]) in ("ANY", "NOT_LITERAL") and high > 20:
            return _FILL
        return once * max(low, 1 if "SUBPATTERN" in {str(kind) for kind, _ in inner} else low)
    if kind == "IN":
        return _member(value)
    return {"ANY": "x", "NOT_LITERAL": "x", "ATOMIC_GROUP": ""}.get(kind, "")


def _member(choices: Any) -> str:
    """Return one character of a set."""
    kinds = [(str(kind), value) for kind, value in choices]
    if kinds and kinds[0][0] == "NEGATE":
        return "x"
    kind, value = kinds[0]
    if kind == "RANGE":
        return chr(value[0])
    if kind == "CATEGORY":
        return {"CATEGORY_DIGIT": "4", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "x"}.get(str(value), ".")
    return chr(value)
