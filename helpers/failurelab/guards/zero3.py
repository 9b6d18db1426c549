"""A guard that names the wrong object where generation under ZeRO-3 is handed the bare model.

`trainer.model` and the engine around it look alike, and nothing checks which one is handed over. trl 0.14 then fails
five frames deeper (`object has no attribute 'optimizer'`, https://github.com/huggingface/trl/issues/2782); trl 0.15 and
later skip the removal of the hooks without a word, and so does a callback that calls `model.generate` itself: then
each token gathers every layer again.

    trainer.add_callback(guards.EngineGuard(trainer))
"""

import dataclasses
import sys
import weakref
from collections.abc import Callable
from typing import Any

from failurelab import zero3
from failurelab.guards.base import Guard
from failurelab.handles import Handle, wrap_method

_HANDS_OVER = ("unwrap_model_for_generation", "_unwrap_model_for_generation")


@dataclasses.dataclass(frozen=True)
class HandOver:
    """What generation was handed.

    Attributes:
        kind: name of the object's class.
        engine: name of the engine's class, empty where there is no engine yet.
        hooks: of ZeRO-3, on the model at that time.
        where: the function that handed it over, or `generate`.
    """

    kind: str
    engine: str
    hooks: int
    where: str


class EngineGuard(Guard):
    """Stop or warn when generation under ZeRO-3 gets the bare model, or runs with ZeRO-3's hooks on.

    It listens during training on two methods of the trainer's own objects: `accelerator.unwrap_model`, as TRL's
    `unwrap_model_for_generation` calls it, and `model.generate`. Without partitioned parameters it does nothing.
    `report`, a `HandOver`, is what it tripped on; None while all is well.

    Args:
        trainer: the trainer that it is added to; callbacks are not given it.
        action: `stop` raises GuardTripped before anything is generated, `warn` issues a GuardWarning, once.
    """

    def __init__(self, trainer: Any, action: str = "stop"):
        super().__init__(action)
        self._trainer = weakref.ref(trainer)
        self._handles: list[Handle] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start to listen; the engine is there by now."""
        self._stop()
        self.report = None
        trainer = self._trainer()
        if trainer is None or not zero3.partitioned(trainer.model):
            return
        what = "watched by EngineGuard"
        self._handles = [wrap_method(trainer.accelerator, "unwrap_model", self._unwrapping, what)]
        if callable(getattr(trainer.model, "generate", None)):
            self._handles.append(wrap_method(trainer.model, "generate", self._generating, what))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening."""
        self._stop()

    def _unwrapping(self, unwrap: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        where = _caller()
        if where and not zero3.is_engine(model):
            self._found(model, where)
        return unwrap(model, *args, **kwargs)

    def _generating(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = generate.__self__
        if zero3.hooks(model):
            self._found(model, "generate")
        return generate(*args, **kwargs)

    def _found(self, model: Any, where: str) -> None:
        if self.report is not None:
            return  # told once
        trainer = self._trainer()
        engine = zero3.engine_of(trainer)
        kind = type(engine).__name__ if engine is not None else ""
        self.report = HandOver(type(model).__name__, kind, zero3.hooks(trainer.model), where)
        self._trip(
            f"{where} is handed the bare model, {self.report.kind}, and its parameters are partitioned by ZeRO-3. "
            f"{self.report.hooks} hooks are on it, which only the engine around it, {kind or 'not made yet'}, can take "
            "out: trl 0.14 fails here with \"object has no attribute 'optimizer'\", later ones leave them on, and each "
            "token gathers every layer again. Next: hand over trainer.model_wrapped, or generate under "
            "failurelab.zero3.generation_model(trainer).",
            self.report,
        )

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _caller() -> str:
    """Return the name of TRL's function that unwraps for generation, if it is what called; else an empty text."""
    frame = sys._getframe(1)
    for _ in range(4):  # _unwrapping, the dispatch of wrap_method, and the caller itself
        frame = frame.f_back
        if frame is None:
            return ""
        if frame.f_code.co_name in _HANDS_OVER:
            return "unwrap_model_for_generation"
    return ""
