"""A guard that trips when generation under ZeRO-3 gets the bare model instead of the engine.

`trainer.model` and the engine around it look alike, and nothing checks which one is handed over. trl 0.14 then fails
five frames deeper (`object has no attribute 'optimizer'`, https://github.com/huggingface/trl/issues/2782). trl 0.15 and
later leave the hooks on without a message, and so does a callback that calls `model.generate` itself: then each token
gathers every layer again.

    trainer.add_callback(guards.Zero3Guard(trainer))
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

from failurelab import zero3
from failurelab.failures import verdicts
from failurelab.guards.base import Action, Guard
from failurelab.handles import wrap_method

_HANDS_OVER = ("unwrap_model_for_generation", "_unwrap_model_for_generation")


class Zero3Guard(Guard):
    """Stop or warn when generation under ZeRO-3 gets the bare model, or runs with ZeRO-3's hooks on.

    It listens during training on two methods of the trainer's own objects: `accelerator.unwrap_model`, as TRL's
    `unwrap_model_for_generation` calls it, and `model.generate`. Without partitioned parameters it does nothing.
    `report` is the message once it has tripped, else None.

    Args:
        trainer: the trainer that it is added to, which callbacks do not get.
        action: `stop` raises GuardTripped before anything is generated, `warn` issues a GuardWarning, once.
    """

    failures = ("F4",)

    def __init__(self, trainer: Any, action: Action = "stop"):
        super().__init__(action)
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self._watched = 0  # hand-overs and generations seen
        self._figures: verdicts.Figures = {}  # of the last of them

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start to listen; the engine is there by now."""
        self._stop()
        self.report, self._watched = None, 0
        trainer = self._trainer()
        if trainer is None or not zero3.partitioned(trainer.model):
            self._nothing_to_check("no parameter is partitioned by ZeRO-3, so there is nothing to watch")
            return
        self._bare = zero3.figures(trainer.model)
        watched: list[tuple[Any, str, Any]] = [(trainer.accelerator, "unwrap_model", self._around_unwrap)]
        if callable(getattr(trainer.model, "generate", None)):
            watched.append((trainer.model, "generate", self._around_generate))
        for owner, name, around in watched:
            self._listening.enter_context(wrap_method(owner, name, around, "watched by Zero3Guard"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening."""
        if self._watched and self.report is None:
            message = f"saw generation {self._watched} times: the engine was handed over, or ZeRO-3's hooks were out"
            self._conclude(message, [self._figures], {"the bare model handed over": self._bare})
        super().on_train_end(args, state, control)

    def _around_unwrap(self, unwrap: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check(self._judge_unwrap, *args, **kwargs)
        return unwrap(*args, **kwargs)

    def _judge_unwrap(self, model: Any, *_: Any, **__: Any) -> None:
        if where := _find_caller():  # an engine takes the hooks out, and the bare model keeps them
            self._judge(model, where, {"generates_without_hooks": zero3.is_engine(model)})

    def _around_generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check(self._judge_generate, generate)
        return generate(*args, **kwargs)

    def _judge_generate(self, generate: Any) -> None:
        model = generate.__self__
        self._judge(model, "generate", {"generates_without_hooks": zero3.figures(model)["generates_without_hooks"]})

    def _judge(self, model: Any, where: str, measured: verdicts.Figures) -> None:
        self._watched += 1
        self._figures = {"zero_stage": 3, "generations": self._watched, **measured}
        if self.report is not None or not self._finds("F4", self._figures):
            return  # once is enough
        trainer = self._trainer()
        engine = zero3.engine_of(trainer)
        kind = "not made yet" if engine is None else type(engine).__name__
        self.report = (
            f"{where} is handed the bare model, {type(model).__name__}, and its parameters are partitioned by ZeRO-3. "
            f"{zero3.hooks(trainer.model)} hooks are on it, which only the engine around it, {kind}, can take "
            "out: trl 0.14 fails here with \"object has no attribute 'optimizer'\", later ones leave them on, and each "
            "token gathers every layer again. Next: hand over trainer.model_wrapped, or generate under "
            "failurelab.zero3.generation_model(trainer)."
        )
        self._trip(self.report, self.report)


def _find_caller() -> str:
    """Return the name of TRL's function that unwraps for generation, if it is the caller; else an empty text."""
    frame = sys._getframe(1)
    for _ in range(6):  # _judge_unwrap, _check, _around_unwrap, the dispatch of wrap_method, and the caller itself
        back = frame.f_back
        if back is None:
            return ""
        frame = back
        if frame.f_code.co_name in _HANDS_OVER:
            return "unwrap_model_for_generation"
    return ""
