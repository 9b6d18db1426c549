"""Changes to a live model that can be taken back: handles, one method of one object wrapped, modes kept for a block.

A repair that is left behind, or taken back twice, is a new failure. So every repair here is a handle: it says what it
did, is removed once, and removing it restores what was there, whatever was changed after it.
"""

import contextlib
import functools
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_unseen = 0  # blocks of `unseen` that are open


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Inside, guards do not listen: what runs is a measurement of this package, and no pass of the trainer."""
    global _unseen
    _unseen += 1
    try:
        yield
    finally:
        _unseen -= 1


def is_unseen() -> bool:
    """Whether a measurement of this package is running."""
    return _unseen > 0


class HandleError(RuntimeError):
    """A handle was removed twice; the message says what it had done."""


class Handle:
    """A change that `remove()` takes back, once; as a context manager it is taken back at the end of the block."""

    def __init__(self, what: str, undo: Callable[[], None]):
        self.what = what
        self._undo: Callable[[], None] | None = undo

    @property
    def active(self) -> bool:
        """True until the handle is removed."""
        return self._undo is not None

    def remove(self) -> None:
        """Take the change back.

        Raises:
            HandleError: it was taken back before. A second removal means that two places think they own the change.
        """
        if self._undo is None:
            raise HandleError(
                f"this handle ({self.what}) was removed already, so nothing is left to take back. Next: remove a "
                "handle in one place only, or ask handle.active first; to have the change again, make it again."
            )
        undo, self._undo = self._undo, None
        undo()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self.remove()

    def __repr__(self) -> str:
        return f"<{self.what}: {'active' if self.active else 'removed'}>"


def wrap_method(owner: Any, name: str, around: Callable[..., Any], what: str) -> Handle:
    """Make `owner.name(...)` call `around(method, *args, **kwargs)`, on this one object; `method` is what it was.

    Wraps may be stacked and removed in any order. A deep copy of `owner`, such as a trainer's reference model, carries
    the wrap bound to the copy. It keeps the method's signature: transformers reads there what a forward takes, and
    `generate` would make logits for the whole prompt if it found no name to ask for less.
    """
    if not callable(getattr(owner, name, None)):
        raise AttributeError(f"{type(owner).__name__} has no method {name}: {what} needs one")
    before = vars(owner).get(name)
    active = True

    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        # bound anew each time, so that a deep copy calls its own method and not the original's
        if isinstance(before, types.MethodType) and before.__self__ is owner:
            method = types.MethodType(before.__func__, self)
        else:
            method = _as_method(_of_class(self, name) if before is None else before, self)
        return around(method, *args, **kwargs) if active else method(*args, **kwargs)

    with contextlib.suppress(TypeError, ValueError):  # a callable that tells no signature
        own = inspect.signature(_as_method(getattr(owner, name), owner).__func__)
        dispatch.__signature__ = own  # type: ignore[attr-defined]  # that inspect reads
    wrapped = types.MethodType(dispatch, owner)
    setattr(owner, name, wrapped)

    def undo() -> None:
        nonlocal active
        active = False  # if another wrap came on top, ours stays below it and does nothing
        if vars(owner).get(name) is wrapped:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    return Handle(what, undo)


def _of_class(owner: Any, name: str) -> Any:
    """Return what `owner.name` is where the object itself holds nothing of that name.

    By the rules of attributes: a function of the class is bound to the object. A Mock, a partial, a static method or an
    object that is called is not, and a class method is bound to the class.
    """
    try:
        attribute = inspect.getattr_static(type(owner), name)
    except AttributeError:  # such as a wrapper's, which asks what it wraps
        return type(owner).__getattr__(owner, name)
    bind = getattr(type(attribute), "__get__", None)
    return attribute if bind is None else bind(attribute, owner, type(owner))


def _as_method(function: Callable[..., Any], owner: Any) -> types.MethodType:
    """Return a method of `owner` that calls a function, which may know no owner or another one.

    Such as `model.generate = functools.partial(model.generate, use_cache=False)`: a partial and a lambda have no
    `__self__`, which tells whose method is called.
    """
    if isinstance(function, types.MethodType) and function.__self__ is owner:
        return function

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    with contextlib.suppress(TypeError, ValueError):  # a callable that tells no signature
        own = inspect.signature(function)
        first = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
        told = own.replace(parameters=[first, *own.parameters.values()])
        call.__signature__ = told  # type: ignore[attr-defined]  # that inspect reads
    return types.MethodType(call, owner)


class _Listened:
    """An object that is called and listened to: all but the call is the object's own."""

    def __init__(self, function: Callable[..., Any], call: Callable[..., Any]):
        vars(self).update(_own=function, _call=call, __wrapped__=function, __name__=call.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_own" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether what a function returns has to be awaited: also a partial of one, and an object that is called."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def listen_to(functions: list[Any], after: Callable[..., None]) -> Handle:
    """Replace each function of a list, such as a trainer's reward functions, by one that does the same and tells of it.

    Modules, such as a reward model, stay as they are. Attributes of an object that is called stay its own, so that its
    methods can be called. Coroutine functions are awaited. A result that can be read only once, such as a generator, is
    read here, and the caller gets a list of its values.

    Args:
        functions: replaced in place.
        after: is given, after each call, the place in the list, the arguments, the keyword arguments and what the
            function has returned.
    """
    own, active = list(functions), True

    def pass_on(result: Any, *told: Any) -> Any:
        result = list(result) if isinstance(result, Iterator) else result
        if active:  # another wrapper may lie on top of ours when it is taken back
            after(*told, result)
        return result

    def listened(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        if is_async(function):

            @functools.wraps(function)
            async def call(*args: Any, **kwargs: Any) -> Any:
                return pass_on(await function(*args, **kwargs), index, args, kwargs)

        else:

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return pass_on(function(*args, **kwargs), index, args, kwargs)

        # by which trl logs its rewards; an object that is called has none
        call.__name__ = getattr(function, "__name__", type(function).__name__)
        told: Callable[..., Any] = call
        if not isinstance(function, types.FunctionType) and not is_async(function):  # trl asks for coroutine functions
            told = _Listened(function, call)
        return told

    for index, function in enumerate(own):
        if not isinstance(function, nn.Module):
            functions[index] = listened(index, function)
    replaced = list(functions)

    def undo() -> None:
        nonlocal active
        active = False
        for index, function in enumerate(own):
            if index < len(functions) and functions[index] is replaced[index]:
                functions[index] = function

    return Handle("functions are listened to", undo)


@contextlib.contextmanager
def keep_requires_grad(model: nn.Module) -> Iterator[None]:
    """After the block, parameters require a gradient as before it: PEFT's `disable_adapter` leaves that on."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


@contextlib.contextmanager
def keep_modes(model: nn.Module) -> Iterator[None]:
    """After the block, put every module back into the mode, train or eval, that it was in before."""
    with contextlib.ExitStack() as stack:  # which goes on with the others where one cannot be put back
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        yield


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """For a block, eval mode for all but layers of bitsandbytes; each module's mode is put back after.

    Those have no dropout, and in eval mode they may pack 4-bit weights for inference, for good; no gradient passes
    packed weights (bitsandbytes 0.50, Linear4bit.forward, on some processors).
    """
    with keep_modes(model):
        for module in model.modules():
            if not type(module).__module__.startswith("bitsandbytes"):
                module.training = False
        yield


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """After the block, random numbers go on as if none had been drawn: what is asked beside must not change a run."""
    state, numpy = random.getstate(), getattr(sys.modules.get("numpy"), "random", None)
    drawn = numpy.get_state() if numpy is not None else None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.set_state(drawn)
