"""Texts that a function's own patterns find an answer in: what a reward function asks for is written in it.

form("42", "I add.")  # of re.search(r"<answer>(.*?)</answer>", text): <answer>42</answer>
"""

import contextlib
import functools
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

try:
    from re import _parser as parser  # type: ignore[attr-defined]  # private
except ImportError:  # Python 3.10
    import sre_parse as parser

from failurelab.reward_functions import source

_FORMS = 8
_FREE = -1  # stands for the group of the answer where it is the last free part of a pattern
_ANSWER, _REASONING = "42", "Let me think"
_KEYS = ("content", "role", "assistant", "user", "system")  # of a message: they stand in many functions
Write = Callable[[str, str], str]


def forms(function: Callable[..., Any], answer: str) -> list[Write]:
    """Return functions of an answer and a reasoning that write them as `function` reads them, at most eight.

    Its regular expressions and texts are taken from its code and from the functions of its module that it calls. A
    regular expression counts where it finds `answer` in what is written for it, or, without groups, where it matches.
    """
    known = texts(function)
    written: list[Write] = []
    for pattern in known:
        for group in _groups(pattern):
            write = functools.partial(_write, pattern, group)
            match = re.search(pattern, write(answer, _REASONING), re.DOTALL)
            if match and (group == _FREE or (match[group] or "").strip() == answer):
                written.append(write)
    tags = [text[1:-1] for text in known if re.fullmatch(r"<\w+>", text)]
    if tags:
        written.append(functools.partial(_tagged, tags))
    for text in known:
        if len(text) <= 30 and re.search(r"[:：#=]\s*$|\bis\s*$", text):
            written.append(functools.partial(_cued, text.rstrip()))
    said = [text for text in known if 1 < len(text) <= 30 and not re.search(r"[\\{}*\n]", text) and text not in _KEYS]
    if said:
        written.append(functools.partial(_saying, said[:12]))
    if any("json" in code.co_names for code, _ in _codes(function)):
        keys = [text for text in known if re.fullmatch(r"[A-Za-z_]\w*", text)]
        if keys:
            written += [functools.partial(_object, keys, number) for number in (False, True)]
    return list({write(_ANSWER, _REASONING): write for write in reversed(written)}.values())[::-1][:_FORMS]


def _tagged(tags: list[str], answer: str, reasoning: str) -> str:
    return "".join(f"<{tag}>{reasoning}</{tag}>" for tag in tags[:-1]) + f"<{tags[-1]}>{answer}</{tags[-1]}>"


def _cued(cue: str, answer: str, reasoning: str) -> str:
    return f"{cue} {answer}"


def _saying(words: list[str], answer: str, reasoning: str) -> str:
    return "\n".join([reasoning, *words, answer])


def _object(keys: list[str], number: bool, answer: str, reasoning: str) -> str:
    """Return a JSON object that has the answer under each key that the function names."""
    value = json.dumps(answer)
    if number:
        with contextlib.suppress(ValueError):
            value = json.dumps(json.loads(answer))
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key in keys) + "}"


def texts(function: Any) -> list[str]:
    """Return the texts and patterns that stand in a function, and in what it calls in its own module."""
    found = [each for code, values in _codes(function) for each in (*code.co_consts, *values)]
    found = [each.pattern if isinstance(each, re.Pattern) else each for each in found]
    return list(dict.fromkeys(each for each in found if isinstance(each, str)))


def _codes(function: Any, depth: int = 3) -> Iterator[tuple[types.CodeType, list[Any]]]:
    """Yield the code of a function, of what is defined in it, and of what it calls in its own module.

    Beside the code stand the values of the names that are from outside.
    """
    instance, function = function, source.plain_function(function)
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


def _groups(pattern: str) -> list[int]:
    """Return the groups that may hold an answer; of a pattern without any, its last free part."""
    try:
        count = re.compile(pattern).groups if re.search(r"[(.*\\]", pattern) else None
        free = count is not None and bool(_free(parser.parse(pattern)))
    except (re.error, RecursionError, OverflowError):
        return []
    return [*range(1, (count or 0) + 1), *([_FREE] if free else [])]


def _write(pattern: str, group: int, answer: str, reasoning: str) -> str:
    """Return a text that a pattern matches, with `answer` in one of its groups."""
    parsed = parser.parse(pattern)
    last = (_free(parsed) or [None])[-1] if group == _FREE else None

    def part(tokens: Any) -> str:
        return "".join(token(str(kind), value) for kind, value in tokens)

    def token(kind: str, value: Any) -> str:
        if kind == "LITERAL":
            return chr(value)
        if kind == "SUBPATTERN":
            return answer if value[0] == group else part(value[-1])
        if kind == "BRANCH":
            return part(value[1][0])
        if kind in _REPEATS and _is_free(value):
            return answer if value is last else reasoning
        if kind in _REPEATS:
            low, _, inner = value
            return part(inner) * max(int(low), "SUBPATTERN" in {str(kind) for kind, _ in inner})
        if kind == "IN":
            return _member(value)
        return "x" if kind in ("ANY", "NOT_LITERAL") else ""

    return part(parsed)


def _free(tokens: Any) -> list[Any]:
    """Return the parts of a pattern that match any text, in order."""
    found: list[Any] = []
    for kind, value in tokens:
        if str(kind) in _REPEATS and _is_free(value):
            found.append(value)
        elif str(kind) == "SUBPATTERN":
            found += _free(value[-1])
        elif str(kind) == "BRANCH":
            found += _free(value[1][0])
        elif str(kind) in _REPEATS:
            found += _free(value[2])
    return found


_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def _is_free(repeat: Any) -> bool:
    low, high, inner = repeat
    if low > 1 or high <= 20 or len(inner) != 1:
        return False
    kind, value = str(inner[0][0]), inner[0][1]
    return kind in ("ANY", "NOT_LITERAL") or (
        kind == "IN" and {str(each) for _, each in value} >= {"CATEGORY_SPACE", "CATEGORY_NOT_SPACE"}
    )


def _member(choices: Any) -> str:
    """Return one character of a set."""
    kind, value = str(choices[0][0]), choices[0][1]
    if kind == "NEGATE":
        return "x"
    if kind == "RANGE":
        return chr(value[0])
    if kind == "CATEGORY":
        return {"CATEGORY_DIGIT": "4", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "x"}.get(str(value), ".")
    return chr(value)
