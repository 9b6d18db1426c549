"""The one place where every way to load a model ends: `PreTrainedModel.from_pretrained`, replaced for a block.

The Auto classes, a trainer that is given a name, and PEFT's Auto classes all come there. And the device map as
transformers makes it of what it is given, for devices that are not there.

Sources: transformers `PreTrainedModel.from_pretrained`; accelerate `infer_auto_device_map`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
FOR_FILES = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code", "code_revision")
_FOR_MODELS = (*FOR_FILES, "torch_dtype", "dtype", "attn_implementation", "quantization_config", "device_map")


@dataclasses.dataclass
class Call:
    """One call of `from_pretrained`.

    Attributes:
        cls: the model's class.
        name: of the checkpoint, or None.
        arguments: the other positional ones.
        config: as it was given: by the Auto classes, always.
        options: the other keyword arguments.
        original: transformers' own function.
    """

    cls: Any
    name: Any
    arguments: tuple[Any, ...]
    config: Any
    options: dict[str, Any]
    original: Callable[..., Any]

    def load(self) -> Any:
        """Load the model as transformers does."""
        return self.original(self.cls, self.name, *self.arguments, config=self.config, **self.options)

    def read_config(self) -> Any:
        """Return the configuration, of the checkpoint if none was given, with the options that belong to it."""
        if self.config is None:
            asked = {key: self.options[key] for key in FOR_FILES if key in self.options}
            self.config = self.cls.config_class.from_pretrained(self.name, **asked)
            for key in [key for key in self.options if hasattr(self.config, key) and key not in _FOR_MODELS]:
                setattr(self.config, key, self.options.pop(key))
        return self.config


@contextlib.contextmanager
def loaded_by(load: Callable[[Call], Any]) -> Iterator[None]:
    """Inside, every `from_pretrained` of a model returns what `load` makes of the call."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: type, name: Any = None, *arguments: Any, config: Any = None, **options: Any) -> Any:
        return load(Call(cls, name, arguments, config, options, original))

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield


def resolve_map(device_map: Any, model: torch.nn.Module, in_4bit: bool, devices: Any) -> dict[str, Any]:
    """Return a device map as transformers makes it: from nothing, one device, a word, or a mapping.

    Args:
        device_map: as `from_pretrained` is given it.
        model: what is loaded; meta tensors are enough.
        in_4bit: whether it is quantized: without a map, the quantizer chooses the current device.
        devices: is asked for `device_count()` and `current_device()`: `torch.cuda`, `torch.sim`. A word spreads the
            model over all of them, as if it had no room on one.
    """
    if device_map is None:
        return {"": devices.current_device() if in_4bit else "cpu"}
    if isinstance(device_map, str) and device_map in AUTOMATIC:
        from accelerate import infer_auto_device_map

        count = devices.device_count()
        if count < 2:
            return {"": 0}
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        room = dict.fromkeys(range(count), int(size * 0.7))
        inferred = infer_auto_device_map(model, max_memory=room, no_split_module_classes=["Qwen2DecoderLayer"])
        return {name: place if isinstance(place, int) else count - 1 for name, place in inferred.items()}
    return dict(device_map) if isinstance(device_map, dict) else {"": device_map}


def mark_as_4bit(model: Any, device_map: dict[str, Any] | None) -> None:
    """Give a model what transformers writes on one that it has loaded in 4 bit: accelerate looks at that alone.

    Devices are written by name, because torch takes a bare number for nothing on a machine without GPUs.
    """
    from transformers.utils.quantization_config import QuantizationMethod

    model.is_loaded_in_4bit = True
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
    if device_map is not None:
        model.hf_device_map = name_devices(device_map)


def name_devices(device_map: dict[str, Any]) -> dict[str, Any]:
    """Return a device map whose devices are names, `cuda:1`."""
    return {name: f"cuda:{place}" if isinstance(place, int) else str(place) for name, place in device_map.items()}
