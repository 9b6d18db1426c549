"""Weights that the script puts into a model by their names, and how many of the names the model has.

`load_state_dict(strict=False)` passes over each name that it does not know, without a word; peft's own
`set_peft_model_state_dict` calls it so too. What it returns is mostly not looked at.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from failurelab.preflight.script_text import location, own_frames, read_source
from failurelab.preflight.stage.own_code import OwnCode
from failurelab.preflight.training import StateLoad

_OF_PEFT = "set_peft_model_state_dict"


@contextlib.contextmanager
def noted(states: list[StateLoad], own: OwnCode) -> Iterator[None]:
    """Inside, each `load_state_dict(strict=False)` that the script's own code asks for is added to `states`."""
    original = torch.nn.Module.load_state_dict

    def load_state_dict(
        self: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        names = tuple(map(str, state_dict))
        result = original(self, state_dict, strict, *args, **kwargs)
        if strict or not names or not own.asks(through=(_OF_PEFT,)):
            return result
        frame = next(own_frames(own.holds))
        file = frame.f_code.co_filename
        place = location(file, frame.f_lineno, read_source(file))
        states.append(StateLoad(weakref.ref(self), names, tuple(tensor_names(self)), place))
        return result

    with mock.patch.object(torch.nn.Module, "load_state_dict", load_state_dict):
        yield


def tensor_names(model: torch.nn.Module) -> list[str]:
    """Return the names that a model takes weights by: of its parameters and buffers."""
    return [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
