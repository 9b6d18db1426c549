"""DeepSpeed's engine as a trainer meets it: an object around the model, which is not the model.

No engine runs here. The stand-in has what code trips over: it answers for the model's attributes, but its `config` is
its own (TRL #3016), and only the engine can take out ZeRO-3's hooks, so what hands over the bare model is noted.
"""

import contextlib
import pathlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from failurelab.handles import wrap_method
from failurelab.preflight.inputs import Seen


class DeepSpeedEngine(torch.nn.DataParallel):
    """A wrapper that accelerate takes off; on no device of its own, so that it calls the model as it is."""

    def __init__(self, module: torch.nn.Module):
        torch.nn.Module.__init__(self)
        self.module, self.device_ids = module, []
        self.config: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what the model has under a name that the engine has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@contextlib.contextmanager
def stands_in(seen: Seen) -> Iterator[None]:
    """Inside, a trainer under DeepSpeed trains through the stand-in; `seen.handed_over` gets what is generated with."""
    trainer = seen.trainer

    def around_prepare(prepare: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(model, *args, **kwargs)
        return DeepSpeedEngine(prepared) if model is trainer.model else prepared

    def around_unwrap(unwrap: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if (taker := _find_taker()) and (model is trainer.model or isinstance(model, DeepSpeedEngine)):
            seen.handed_over[taker] = model is trainer.model
        return unwrap(model, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        if seen.zero_stage:
            stack.enter_context(wrap_method(trainer.accelerator, "prepare_model", around_prepare, "with an engine"))
            stack.enter_context(wrap_method(trainer.accelerator, "unwrap_model", around_unwrap, "watched"))
        yield


def _find_taker() -> str:
    """Return what asks trl to make a model ready to generate, with its line; empty if nothing does."""
    asked = False
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_name.endswith("unwrap_model_for_generation"):
            asked = True
        elif asked and code.co_filename != contextlib.__file__:
            return f"{code.co_name} ({pathlib.Path(code.co_filename).name}, line {line})"
    return ""
