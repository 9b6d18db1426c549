"""Keywords that the installed release does not take: left out, or handed on by the name that took their place.

A keyword that was removed or renamed ends a script in a TypeError before anything of it can be judged. So the
configuration and the trainer are made without it, and what was left out is told, with what the table of names says.
"""

import argparse
import contextlib
import difflib
import functools
import importlib.metadata
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from failurelab.failures import names

_NEAR = 0.9  # of a name to another one, for which it is taken
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


class LeftOut:
    """Keywords that classes of the script's did not take.

    Attributes:
        of: for each kind of call (`arguments`, `trainer`) and class, its keywords: the name that is taken in their
            place, or None, and what the table of names says.
    """

    def __init__(self) -> None:
        self.unread: list[str] = []  # keys of a file that trl's parser reads and no class of it takes
        self.of: dict[tuple[str, str], dict[str, tuple[str | None, str]]] = {}

    def call(self, kind: str, original: Callable[..., None], made: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Call an `__init__`, and again without each keyword that it does not take.

        Raises:
            TypeError: of another cause, or from inside the call.
        """
        inside = getattr(inspect.unwrap(original), "__code__", None)
        while True:
            try:
                return original(made, *args, **kwargs)
            except TypeError as error:
                name = (_UNEXPECTED.search(str(error)) or ["", ""])[1]
                ran = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
                if name not in kwargs or inside in ran:
                    raise
                value, known = kwargs.pop(name), self.of.setdefault((kind, type(made).__name__), {})
                if old := next((old for old, (new, _) in known.items() if new == name), None):
                    known[old] = (None, known[old][1])  # what shall take its place is not taken either
                    continue
                said, new = _explain(type(made), name)
                owners = [kind.__name__ + end for kind in type(made).__mro__ for end in ("", ".__init__")]
                if not new and not any(names.find(owner, name) for owner in owners):  # a slip of the pen, perhaps
                    taken = [each for each in inspect.signature(original).parameters if each not in kwargs]
                    new = next(iter(difflib.get_close_matches(name, taken, n=1, cutoff=_NEAR)), "")
                known[name] = (new if new and new not in kwargs else None, said)
                if known[name][0]:
                    kwargs[str(new)] = value

    @contextlib.contextmanager
    def arguments(self) -> Iterator[None]:
        """Inside, training arguments are made without keywords that their class does not take."""
        from transformers import TrainingArguments

        make = argparse.ArgumentParser.__init__  # trl's parser inherits it from transformers, or from a copy of that

        @functools.wraps(make)
        def made(parser: Any, *args: Any, **kwargs: Any) -> None:
            make(parser, *args, **kwargs)
            if read := getattr(parser, "set_defaults_with_config", None):  # of trl's own
                parser.set_defaults_with_config = functools.partial(self._read_file, read)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(argparse.ArgumentParser, "__init__", made))
            wrapped: set[type] = set()

            def new(cls: type, *args: Any, **kwargs: Any) -> Any:
                for kind in cls.__mro__[: cls.__mro__.index(TrainingArguments) + 1]:
                    if kind not in wrapped and "__init__" in vars(kind):
                        wrapped.add(kind)
                        stack.enter_context(mock.patch.object(kind, "__init__", self._wrap(vars(kind)["__init__"])))
                return object.__new__(cls)

            # A class whose __new__ is taken away again refuses arguments, so it keeps one that does nothing.
            TrainingArguments.__new__ = new
            stack.callback(setattr, TrainingArguments, "__new__", lambda cls, *args, **kwargs: object.__new__(cls))
            yield

    def _read_file(self, read: Callable[..., list[str]], **config: Any) -> list[str]:
        left = read(**config)
        self.unread += [word.removeprefix("--") for word in left if word.startswith("--")]
        return left

    def _wrap(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            self.call("arguments", original, made, args, kwargs)

        return init


def installed() -> dict[str, str]:
    """Return the versions of the libraries whose names are known."""
    versions = {}
    for package in ("trl", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _explain(kind: type, name: str) -> tuple[str, str]:
    """Return what the table says of a keyword that a class does not take, and what takes its place."""
    for parent in kind.__mro__:
        error = f"{parent.__name__}.__init__() got an unexpected keyword argument '{name}'"
        if said := names.explain(error, installed()):
            return said, names.replacement(error)
    return "", ""
