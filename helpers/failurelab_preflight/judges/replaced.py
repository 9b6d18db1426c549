"""What the script has put in the place of a library's functions.

The objects are asked and no text: a function of trl, transformers or peft whose code lies in the script's own files was
put there by the script, on a module, a class or an object, also by a decorator around the library's own.
"""

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from failurelab_preflight.script_text import location, read_source

LIBRARIES = ("trl", "transformers", "peft")
_FUNCTIONS = (
    types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.partial,
    type(functools.cache(len)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A function of a library in whose place one of the script's own stands.

    Attributes:
        name: such as `trl.trainer.utils.selective_log_softmax`.
        file: of the script's own function.
        line: where that begins.
    """

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({location(self.file, self.line, read_source(self.file))})"


def find_replaced(own: Callable[[str], bool], *things: Any) -> list[Replaced]:
    """Return the library's functions that the script has replaced, each function of the script's once.

    Args:
        own: whether a file of code is the script's own.
        things: objects that may have methods of their own: a trainer, a model.
    """
    found: dict[types.CodeType, str] = {}
    for name, holder in _holders(own, things):
        for attribute, value in list(vars(holder).items()):
            at_object = not isinstance(holder, (type, types.ModuleType))
            if at_object and not callable(getattr(type(holder), attribute, None)):
                continue  # what an object is given, and not a method of its class
            code = next((code for code in codes_of(value) if own(code.co_filename)), None)
            if code is not None:
                found.setdefault(code, f"{name}.{attribute}")
    return [Replaced(name, code.co_filename, code.co_firstlineno) for code, name in found.items()]


def _holders(own: Callable[[str], bool], things: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the classes and modules of the libraries that are loaded, by name, and then the objects.

    A copy of a library that lies among the script's own files is the script's own as a whole.
    """
    modules = [(n, m) for n, m in list(sys.modules.items()) if n.partition(".")[0] in LIBRARIES and m is not None]
    for name, module in sorted(modules, key=lambda item: -item[0].count(".")):  # where it is defined, before re-exports
        if own(getattr(module, "__file__", None) or "<none>"):
            continue
        yield name, module
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                yield f"{name}.{value.__qualname__}", value
    for thing in things:
        yield type(thing).__name__, thing


def codes_of(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of those that it wraps."""
    while isinstance(value, _FUNCTIONS):  # a stand-in for a class that is not installed raises at any question
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        else:
            if isinstance(value, types.FunctionType):
                yield value.__code__
            value = getattr(value, "__wrapped__", None)
