"""What the script has put in the place of a library's functions, and overrides that change nothing.

The objects are asked and no text: a function of trl, transformers or peft whose code lies in the script's own files was
put there by the script, on a module, a class or an object, also by a decorator around the library's own. An override
that hands on what it was given, and returns what its parent returned, leaves the run as the library has it. So does a
method under a name that this release does not call.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from failurelab.failures import names
from failurelab.handles import keep_random_state, unseen, wrap_method
from failurelab.preflight.answer import Finding
from failurelab.preflight.repairs import EditableScript, Repair, WithoutMethod
from failurelab.preflight.script_text import Edit, location, read_source
from failurelab.preflight.stage.releases import installed
from failurelab.preflight.training import Training
from failurelab.rewards import signature

LIBRARIES = ("trl", "transformers", "peft")
OVERRIDE = "override"
_FUNCTIONS = (
    types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.partial,
    type(functools.cache(len)),
)  # fmt: skip
_OF_THE_STEP = (  # methods whose result a gradient depends on
    "compute_loss", "_compute_loss", "_get_per_token_logps", "_get_per_token_logps_and_entropies", "_prepare_inputs",
    "_generate_and_score_completions", "_calculate_rewards", "training_step",
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


@dataclasses.dataclass(frozen=True)
class WithoutPatches(Repair):
    """Statements taken out that put a function of the script's own in the place of a library's.

    Attributes:
        names: of the attributes that they set.
        files: in which they are looked for.
    """

    names: tuple[str, ...]
    files: tuple[str, ...]

    def edit(self, script: EditableScript) -> list[Edit]:
        """Take out assignments to such an attribute, and calls of `setattr`."""
        edits = []
        for file in self.files:
            text = script.texts(file)
            for node in ast.walk(text.tree) if text else ():
                if text and isinstance(node, ast.stmt) and _sets(node) in self.names:
                    edits.append(text.without(node))
        return edits


def _sets(node: ast.stmt) -> str:
    """Return the attribute that a statement sets; empty if it sets none."""
    if isinstance(node, ast.Assign):
        return next((target.attr for target in node.targets if isinstance(target, ast.Attribute)), "")
    call = getattr(node, "value", None)
    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "setattr" and len(call.args) == 3:
        return str(getattr(call.args[1], "value", ""))
    return ""


class OverrideJudge:
    """Watches the script's own overrides of what a step is made of, for two calls each."""

    def __init__(self, training: Training):
        self.training = training
        self._calls: dict[str, list[bool]] = {}  # of each method, whether its parent's result was handed on as it was
        self._reads: dict[str, str] = {}  # a key that it reads and never gets
        self._slopes: dict[str, tuple[float, float]] = {}  # of an override's loss, where its parent's is below 0, above

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, overrides are watched."""
        trainer = self.training.trainer
        with contextlib.ExitStack() as stack:
            for name in _OF_THE_STEP:
                kinds = [kind for kind in type(trainer).__mro__ if name in vars(kind)]
                ours = [kind for kind in kinds if kind.__module__.partition(".")[0] not in LIBRARIES]
                if ours and kinds[0] is ours[0] and len(kinds) > 1:
                    watch = functools.partial(self._watch, name, kinds[0], kinds[1])
                    stack.callback(wrap_method(trainer, name, watch, "an override is watched").remove)
            yield

    def _watch(self, name: str, kind: type, parent: type, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        known = self._calls.setdefault(name, [])
        if len(known) > 1 or name not in vars(parent):
            return method(*args, **kwargs)
        given, original = _copied((args, kwargs)), vars(parent)[name]
        passed: list[tuple[bool, Any]] = []

        @functools.wraps(original)
        def noted(trainer: Any, *a: Any, **k: Any) -> Any:
            same = _same(_by_name(original, *given), _by_name(original, a, k))
            result = original(trainer, *a, **k)
            passed.append((same, (result, _copied(result))))
            return result

        with mock.patch.object(parent, name, noted):
            result = method(*args, **kwargs)
        once = len(passed) == 1 and passed[0][0]
        known.append(once and result is passed[0][1][0] and _same(result, passed[0][1][1]))
        self._reads.setdefault(name, _missing_key(vars(kind)[name], original, args, kwargs))
        both = parent.__name__ in _LOSS_OF_BOTH_SIGNS and torch.is_grad_enabled()
        if both and name.endswith("compute_loss") and name not in self._slopes:
            with unseen(), keep_random_state(), contextlib.suppress(Exception):  # of the script's own, in an odd place
                slope = functools.partial(_slope, method, parent, name, args, kwargs)
                below, above = (torch.full_like(result.detach(), value).requires_grad_() for value in (-0.1, 0.1))
                self._slopes[name] = slope(below), slope(above)
        return result

    def answers(self) -> Iterator[Finding]:
        """Yield the overrides that changed nothing: suspected, where one reads a key that never comes, or is dead."""
        trainer = self.training.trainer
        callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
        for thing in (trainer, *callbacks):
            yield from _never_called(thing, self.training.own)
        for name, (below, above) in self._slopes.items():
            if abs(below - above) > 1e-3 * abs(above):
                kind = next(kind for kind in type(trainer).__mro__ if name in vars(kind))
                yield Finding(
                    "F21",
                    f"{kind.__name__}.{name} multiplies the gradient of a loss below 0 by {below:g}, and of one above "
                    f"0 by {above:g}: the sign of this loss says nothing, and its gradient is right below 0 too",
                    "Return the library's loss as it is, whatever its sign.",
                    undo=WithoutMethod(kind, name),
                    part=name,
                    fault="sign",
                    own=True,
                )
        for name, calls in self._calls.items():
            if not calls or not all(calls):
                continue
            function = next(vars(kind)[name] for kind in type(trainer).__mro__ if name in vars(kind))
            code = inspect.unwrap(function).__code__
            place = location(code.co_filename, code.co_firstlineno, read_source(code.co_filename))
            said = f"{type(trainer).__name__}.{name} is overridden, and its result is bit for bit the library's"
            if key := self._reads.get(name):
                said += f": it reads {key!r} of its inputs, which never comes there"
                repair = f"Let {key!r} come into its inputs, or take the override out."
                why = "whether it was meant to change something is not known"
                yield Finding.suspected(OVERRIDE, said, why, repair, part=name, place=place)
            else:
                asked = f"{said} in this run ({place}). Does it act under a condition alone?"
                yield Finding.not_checked(OVERRIDE, asked, part=name)


_LOSS_OF_BOTH_SIGNS = ("GRPOTrainer", "RLOOTrainer")
_NEAR, _SAME_RELEASE = 0.7, 0.9  # of a name to another one: where a release had it, and where none did


def _never_called(thing: Any, own: Callable[[str], bool]) -> Iterator[Finding]:
    """Yield methods that a script writes for a library to call, and that nothing calls: by their names they are dead.

    Nothing in the files of the classes names them, and the library has no method of that name, but another release
    has, or it has one of nearly that name. A class that has that one too is made for several releases.
    """
    kinds = type(thing).__mro__
    library = next((kind for kind in kinds if kind.__module__.partition(".")[0] in LIBRARIES), object)
    methods = {name: value for kind in reversed(kinds[: kinds.index(library)]) for name, value in vars(kind).items()}
    functions = {name: value for name, value in methods.items() if isinstance(value, types.FunctionType)}
    ours = {name: value.__code__ for name, value in functions.items() if own(value.__code__.co_filename)}
    text = "".join(read_source(file) for file in {code.co_filename for code in ours.values()})
    for name, code in ours.items():
        if hasattr(library, name) or re.search(rf"(?<!super\(\))\.{name}\b|[\"']{name}[\"']", text):
            continue
        event = name.startswith("on_") and hasattr(library, "on_train_begin")
        said = names.explain(f"AttributeError: '{library.__name__}' object has no attribute '{name}'", installed())
        like = [other for other in dir(library) if callable(getattr(library, other)) and not other.startswith("__")]
        cutoff = _NEAR if said or event else _SAME_RELEASE
        near = next(iter(difflib.get_close_matches(name, like, n=1, cutoff=cutoff)), "")
        if near in ours or not (said or near or event):
            continue
        place = location(code.co_filename, code.co_firstlineno, read_source(code.co_filename))
        yield Finding.suspected(
            OVERRIDE,
            f"{type(thing).__name__}.{name} is never called: the {library.__name__} of this release has no method of "
            f"that name, and nothing in the script's own files calls it. {said}".strip(),
            "whether it was meant to change something is not known",
            f"Override {near}, which is called." if near else "Override what this release calls, or leave it out.",
            part=name,
            place=place,
        )


def _slope(method: Any, parent: type, name: str, args: Any, kwargs: Mapping[str, Any], loss: Any) -> float:
    """Return how much of its parent's loss an override hands on, where that is this one, a number with a gradient."""
    with mock.patch.object(parent, name, lambda *_, **__: loss):
        result = method(*args, **kwargs)
    (slope,) = torch.autograd.grad(result, loss)
    return float(slope)


def _by_name(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a method is called with, by its names, with its defaults; not bound to what it does not take."""
    try:
        bound = inspect.signature(method).bind(None, *args, **kwargs)
    except TypeError:
        return {"args": args, **kwargs}
    bound.apply_defaults()
    return dict(bound.arguments)


def _copied(value: Any) -> Any:
    """Return a copy of what is handed over, with tensors as they are now."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape
        return both and torch.equal(one.detach(), other.detach())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if type(one) in (list, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (isinstance(one, (str, int, float, bool)) and one == other)


def _missing_key(function: Any, original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return a key that a function reads of a mapping that it is given, and that is not there; empty if none.

    What the library's own method asks for too comes in some steps, and not in others.
    """
    tree, known = signature.parse(function), inspect.unwrap(original).__code__.co_consts
    names = [argument.arg for argument in tree.args.args[1:]] if tree else []
    given = {name: value for name, value in [*zip(names, args), *kwargs.items()] if isinstance(value, Mapping)}
    for node in ast.walk(tree) if tree else ():
        whom: Any = None
        key: Any = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            whom, key = node.value, node.slice
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "pop") and node.args:
            whom, key = node.func.value, node.args[0]  # type: ignore[attr-defined]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            whom, key = node.comparators[0], node.left
        its = given.get(getattr(whom, "id", ""))
        if its is not None and isinstance(value := getattr(key, "value", None), str) and value not in (*its, *known):
            return value
    return ""
