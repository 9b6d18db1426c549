"""Every Trainer of the script watched from its making on: trl's, transformers' own, and subclasses of them.

`__init__` and `train` are wrapped on each class between the trainer's and `Trainer` when one is made: trl imports its
trainers late, and some have a `train` of their own.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from failurelab_preflight.stage import models

_LOGINS = ("login", "notebook_login", "interpreter_login")
_SAVING = ("save_model", "push_to_hub", "create_model_card", "save_state")


@contextlib.contextmanager
def watched(run: Any) -> Iterator[None]:
    """Inside, trainers are made by `run.initialize` and trained by `run.train`; nothing is saved, nobody logs in."""
    import huggingface_hub
    from transformers import PreTrainedModel, Trainer

    with contextlib.ExitStack() as stack:
        wrapped: set[type] = set()

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            for kind in cls.__mro__[: cls.__mro__.index(Trainer) + 1]:
                if kind not in wrapped and issubclass(kind, Trainer):
                    wrapped.add(kind)
                    _wrap(kind, run, stack)
            return object.__new__(cls)

        # A class whose __new__ is taken away again refuses arguments, so it keeps one that does nothing.
        Trainer.__new__ = new
        stack.callback(setattr, Trainer, "__new__", lambda cls, *args, **kwargs: object.__new__(cls))
        stack.enter_context(mock.patch.object(PreTrainedModel, "push_to_hub", _nothing))
        for name in _LOGINS:  # what is loaded from the hub is loaded with the token that the machine has
            stack.enter_context(mock.patch.object(huggingface_hub, name, _nothing))
        yield


def _wrap(kind: type, run: Any, stack: contextlib.ExitStack) -> None:
    for name, around in (("__init__", _init), ("train", _train), ("evaluate", _evaluate)):
        if name in vars(kind):
            stack.enter_context(mock.patch.object(kind, name, _call(around, vars(kind)[name], run)))
    for name in _SAVING:
        if name in vars(kind):
            stack.enter_context(mock.patch.object(kind, name, _nothing))


def _call(around: Callable[..., Any], original: Callable[..., Any], run: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(run, original, self, args, kwargs)

    return method


def _init(run: Any, original: Callable[..., None], trainer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    if not run.making or kwargs.get("peft_config"):  # of a subclass that makes its model, the call of its parent
        models.note_given(kwargs.get("model", args[0] if args else None), run.adapters)
    run.initialize(original, trainer, args, kwargs)


def _train(run: Any, original: Callable[..., Any], trainer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if run.training:
        return original(trainer, *args, **kwargs)  # a trainer's own train() that calls its parent's
    run.training = True
    output = run.train(original, trainer)  # which ends the process, but for a training that a later one follows
    if not run.real:
        models.seem_trained(trainer.model, std=0.01)  # little: a small checkpoint's own completions stay what they are
    return output


def _evaluate(run: Any, original: Callable[..., Any], trainer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Give NaN for each metric: what is evaluated is cut."""
    return collections.defaultdict(lambda: float("nan"))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Save and upload nothing."""
