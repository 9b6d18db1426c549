"""Errors that a reward function raises and hides itself, as under `except Exception: return 0.0`.

A completion that cannot be read is caught so in many functions, and that is no fault: how a completion must look, a
made-up one need not know. Told are errors that no completion can help: a key that its columns have not, a name that is
defined nowhere, a call that does not fit. They are seen by a trace of the function's own code, in a fork.
"""

import ast
import builtins
import contextlib
import dataclasses
import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from failurelab.rewards import asking, forms, signature
from failurelab.rewards.causes import never_arrives
from failurelab.rewards.examination import Examination
from failurelab.rewards.forms import Completion
from failurelab.rewards.inputs import OWN
from failurelab.rewards.table import Flag, quote

_ASKED, _SECONDS = 48, 10.0  # completions, each in a call of its own, and the time for all of them
_CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit)  # which end a loop
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = (os.path.dirname(os.__file__) + os.sep, _HERE, "<frozen")


@dataclasses.dataclass(frozen=True)
class _Error:
    """An error that did not leave the function.

    Attributes:
        kind: its type.
        said: type and message.
        place: the function and the line where its own code raises it.
        key: that was missing, of a KeyError.
        name: that is not defined, of a NameError.
        written: whether the code that raises it was made of a text, by exec().
        lacking: what is not here, in words, where the error comes from that.
        caught: what the function does where it catches any error: `constant`, `pass`, or nothing known.
    """

    kind: str
    said: str
    place: str
    key: str | None
    name: str
    written: bool
    lacking: str
    caught: str


def find(x: Examination) -> Flag | None:
    """Return the flag of an error that the function hides, and that no completion can help; else None."""
    right = [each for each in x.completions if each.worth == "right" and not each.variant]
    others = [each for each in right or x.completions if each.form != "alone"]
    alone = [each for each in right if each.form == "alone"]  # the only form in which code is code
    some = alone + others[:: max(1, -(-len(others) // _ASKED))]
    raised = asking.in_fork(lambda: _watch(x, some), _SECONDS + 1)
    if not isinstance(raised, list) or not any(raised):
        return None
    count, what = len(raised), "right answers" if right else "made-up completions"
    places: dict[_Error, list[int]] = {}
    for place, errors in enumerate(raised):
        for error in errors:
            places.setdefault(error, []).append(place)
    for error, at in sorted(places.items(), key=lambda item: -len(item[1])):
        said = (
            f"{x.key} raises {error.said} in {error.place} for {len(at)} of {count} {what} that were asked one by one"
        )
        said += ", and its own except hides that"
        if error.lacking:
            if len(at) == count:
                return x.not_checked(f"{x.key} could not be asked: {error.lacking}, and its own except hides that")
        elif error.key is not None:
            if flag := _column(x, error.key, said, bool(right)):
                return flag
        elif error.name:
            if flag := _name(x, error, said, [some[place] for place in at]):
                return flag
        elif len(at) == count and error.kind in ("TypeError", "AttributeError") and error.caught == "constant":
            repair = "Let the error out (raise), see which line it is, and catch alone what a completion can cause."
            return x.suspected("swallowed", said, repair, "it may be what a completion of another form does not raise")
    return None


def _column(x: Examination, key: str, said: str, is_right: bool) -> Flag | None:
    """Return the flag of a missing key that is a column: handed over, completions are told apart."""
    if key in x.inputs.columns or not key.isidentifier():
        return None
    rows = x.inputs.rows
    sources = {"prompt": lambda row: forms.last_text(row["prompt"])}
    if x.column and x.column in rows[0]:
        sources[x.column] = lambda row: row[x.column]
    if key in rows[0]:
        sources[key] = lambda row: row[key]
    order = sorted(sources, key=lambda name: (name != key, (name == "prompt") == (key in signature.REFERENCES)))
    for name in order:
        if told := x.tells(is_right=is_right, columns={key: sources[name]}):
            tried = f"with {name} under this name {told}"
            flag = never_arrives(x, key, f"{said}: no column {key!r} arrives", tried)
            if key in rows[0] and key not in OWN:
                return flag
            repair = f"Keep the column {key!r} in the dataset (map(remove_columns=...) drops what it names)"
            if name != "prompt":
                repair += f", or read {name!r}, which is there"
            return dataclasses.replace(flag, repair=f"{repair}; and let such an error out.", fix=())
    return None


def _name(x: Examination, error: _Error, said: str, some: Sequence[Completion]) -> Flag | None:
    """Return the flag of a name that is not defined: in the function's own code, or in one that it executes."""
    if not error.written:
        if not error.caught:
            return None
        return x.found("swallowed", said, f"Define or import {error.name}, and let such an error out.")
    name = re.escape(error.name)
    defined = rf"(?m)^\s*(?:async\s+)?(?:def|class|import|from\s+\S+\s+import)\s+{name}\b|^\s*{name}\s*="
    is_own = next((each for each in some if re.search(defined, each.text)), None)
    if is_own is None and not hasattr(builtins, error.name):
        return None
    why = f"the completion {quote(is_own.text)} defines it" if is_own else "it is one of Python's own"
    repair = "Hand exec() one namespace for the code and for what is run after it, and Python's own names with it."
    return x.suspected("swallowed", f"{said}: {why}", repair, "it may be meant that such a name is refused")


def _watch(x: Examination, some: Sequence[Completion]) -> list[list[_Error]]:
    """Return for each completion, asked alone, the errors that the function's own code raises and does not let out."""
    told, ends = [], time.monotonic() + _SECONDS
    for each in some:
        if time.monotonic() > ends:
            break
        given, raised = x.inputs.make([each], wanted=x.wanted), dict[int, tuple[BaseException, Any, Any]]()
        with _traced(raised):
            try:
                asking.call(x.function, given)
            except Exception as error:
                while error is not None:  # what leaves the function, and what that came of
                    raised.pop(id(error), None)
                    error = error.__cause__ or error.__context__  # type: ignore[assignment]
        told.append(list(dict.fromkeys(_described(*each) for each in raised.values())))
    return told


@contextlib.contextmanager
def _traced(raised: dict[int, tuple[BaseException, Any, Any]]) -> Iterator[None]:
    """Note errors by their id, with code and line of the first of the script's own frames that each goes through, and
    of the last.
    """

    def trace(frame: Any, event: str, value: Any) -> Callable[..., Any] | None:
        if not _is_own(frame.f_code.co_filename):
            return None
        if event == "exception" and not isinstance(value[1], _CONTROL):
            here = (frame.f_code, frame.f_lineno)
            first = raised[id(value[1])][1] if id(value[1]) in raised else here
            raised[id(value[1])] = (value[1], first, here)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def _is_own(file: str) -> bool:
    return not file.startswith(_LIBRARY) and "site-packages" not in file and "dist-packages" not in file


def _described(error: BaseException, first: tuple[Any, int], last: tuple[Any, int]) -> _Error:
    code, line = first
    reply = asking._describe(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    written = bool(frames) and frames[-1].f_code.co_filename.startswith("<string")
    text = linecache.getline(code.co_filename, line).strip()
    if written or not text:
        (code, line), text = last, linecache.getline(last[0].co_filename, last[1]).strip()
    place = f"{code.co_name} ({quote(text, 90)[1:-1]})" if text else code.co_name
    name = getattr(error, "name", None) if type(error) is NameError else None
    own = type(error).__name__ if "NoneType" not in reply.error else ""  # of what no pattern finds
    lacking = reply.unasked if asking._is_missing(error) else ""
    return _Error(own, reply.error, place, reply.key, name or "", written, lacking, _caught(error, *last))


def _caught(error: BaseException, code: Any, line: int) -> str:
    """Return what is done where a line's error is caught: `constant` where a value is given that hangs on nothing."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return ""
    tries = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
    ]
    kinds = {kind.__name__ for kind in type(error).__mro__}
    for node in sorted(tries, key=lambda each: -each.lineno):
        for handler in node.handlers:
            types = getattr(handler.type, "elts", [handler.type] if handler.type else [])
            named = {ast.unparse(each) for each in types} or kinds
            unknown = [name for name in named if name.isidentifier() and not hasattr(builtins, name)]
            if {"Exception", "BaseException"} & named or unknown:
                return _given(node.body, handler.body)
            if named & kinds:  # it is caught by its own name: somebody has thought of it
                return ""
    return ""


def _given(body: Sequence[ast.stmt], handler: Sequence[ast.stmt]) -> str:
    values: list[ast.AST | None] = []
    for node in handler:
        if isinstance(node, (ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign)):
            values.append(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).rpartition(".")[2]
            values += node.value.args if called in ("append", "extend") else ()
        elif isinstance(node, ast.Continue):
            values.append(None)
        elif not isinstance(node, ast.Pass):
            return ""
    counted = (
        id(inner)
        for value in values if value for node in ast.walk(value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "len" for inner in ast.walk(node)
    )  # fmt: skip
    left = set(counted)
    names = [n for value in values if value for n in ast.walk(value) if isinstance(n, ast.Name) and id(n) not in left]
    if names:
        return ""
    if values:
        return "constant"
    gives = (ast.Assign, ast.AugAssign, ast.Return)
    return "pass" if any(isinstance(node, gives) for each in body for node in ast.walk(each)) else ""
