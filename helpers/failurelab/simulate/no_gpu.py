"""A script for a GPU on a machine that has none: what it puts on `cuda` is put on the CPU, for the time of a run.

What goes wrong: `model.to("cuda")`, a tensor made with `device="cuda"`, `torch.set_default_device("cuda")`,
`torch.Generator("cuda")`, a file that was saved there, `device_map="cuda"` and
`attn_implementation="flash_attention_2"` end in an error of torch or transformers before anything can be measured.

torch asks a function mode before every function that is given a device, so one mode sees them all, also in the script's
libraries. A default device is a mode of its own, which torch asks last, so it is replaced where it is made. What a
device is called stays: `torch.device("cuda")` is one, and a tensor that is put there says `cpu`. What
stays as well is `torch.cuda.is_available()`: a script that asks takes its own way for a CPU. Where there are GPUs, only
those that are not there are replaced, by the first: of rank 3 of 4, on a machine with one. Devices of `mps` and `xpu`
are replaced in the same way.

Sources: torch `overrides.TorchFunctionMode`, `utils._device.DeviceContext`; transformers
`PreTrainedModel._from_config`.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from failurelab.simulate.cuda import CAPABILITY, MEMORY, Cuda
from failurelab.simulate.loads import AUTOMATIC

_NOTHING_TO_DO = (  # of torch.cuda
    "init", "synchronize", "ipc_collect", "set_per_process_memory_fraction", "reset_peak_memory_stats",
    "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
)  # fmt: skip
_TENSOR_TYPES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ON_ANY_DEVICE = ("eager", "sdpa", "flex_attention")


class Mapped:
    """What was put elsewhere than the script asked, each once: `device cuda -> cpu`."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.place = "cuda:0" if self._gpus else "cpu"

    def tell(self, what: str, place: str) -> None:
        """Note one thing, such as `device_map auto`, and where it is now."""
        text = f"{what} -> {place}"
        if text not in self.texts:
            self.texts.append(text)

    def device(self, asked: Any) -> Any:
        """Return where a device is to be found: the same, if it is there or no device of CUDA."""
        if not self._absent(asked):
            return asked
        self.tell(f"device {f'cuda:{asked}' if isinstance(asked, int) else asked}", self.place)
        return torch.device(self.place)

    def device_map(self, asked: Any) -> Any:
        """Return a device map all of whose places are there."""
        if isinstance(asked, dict):
            places: Any = {name: self.place if self._absent(at) else at for name, at in asked.items()}
        elif self._absent(asked) or (isinstance(asked, str) and asked in AUTOMATIC and not self._gpus):
            places = self.place
        else:
            return asked
        if places != asked:
            self.tell(f"device_map {asked}", self.place)
        return places

    def attention(self, config: Any, options: dict[str, Any]) -> None:
        """Take an attention out of a configuration and a load's options that needs a GPU; sdpa stands there then."""
        if self._gpus:
            return
        asked = [options.get("attn_implementation"), getattr(config, "_attn_implementation", None)]
        if options.pop("use_flash_attention_2", False):
            asked.append("flash_attention_2")
        for name in asked:
            if isinstance(name, str) and name not in _ON_ANY_DEVICE:
                self.tell(f"attn_implementation {name}", "sdpa")
                options["attn_implementation"] = "sdpa"
                if config is not None:
                    config._attn_implementation = "sdpa"

    def _absent(self, asked: Any) -> bool:
        if isinstance(asked, bool) or not isinstance(asked, int | str | torch.device):
            return False
        if isinstance(asked, int):
            return asked >= self._gpus
        kind, _, index = str(asked).partition(":")
        if kind in ("mps", "xpu"):
            module = torch.backends.mps if kind == "mps" else torch.xpu
            return not module.is_available()
        return kind == "cuda" and (int(index) if index.isdigit() else 0) >= self._gpus


@contextlib.contextmanager
def on_this_machine(mapped: Mapped, cuda: Cuda | None = None) -> Iterator[None]:
    """Inside, what is put on a GPU that is not there is put where `mapped` says; all is as before afterwards.

    Args:
        mapped: notes what was put elsewhere.
        cuda: answers what a script asks `torch.cuda` for, where there is no GPU.
    """
    run = threading.Thread.run

    def run_thread(thread: threading.Thread) -> None:  # a mode holds for one thread
        with _Devices(mapped):
            run(thread)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_thread))
        stack.enter_context(_attention_replaced(mapped))
        stack.enter_context(_loading_replaced(mapped))
        stack.enter_context(_generators_replaced(mapped))
        stack.enter_context(_default_device_replaced(mapped))
        if not torch.cuda.is_available():
            functions = _asked_of_cuda(cuda or Cuda(1, seen=1), mapped)
            stack.enter_context(mock.patch.multiple(torch.cuda, **functions))
        stack.enter_context(_Devices(mapped))
        yield


def _asked_of_cuda(cuda: Cuda, mapped: Mapped) -> dict[str, Any]:
    """Return functions of `torch.cuda` that fail without a GPU; whether there is one is not among them."""
    facts = {
        "get_device_properties": cuda.get_device_properties,
        "get_device_name": cuda.get_device_name,
        "get_device_capability": lambda *_, **__: CAPABILITY,
        "mem_get_info": lambda *_, **__: (MEMORY, MEMORY),
    }

    def told(name: str) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            mapped.tell(f"torch.cuda.{name}()", "of a GPU with 80 GiB that is not there")
            return facts[name](*args, **kwargs)

        return answer

    class OneDevice(contextlib.nullcontext[None]):  # torch asks whether something is an instance of it
        def __init__(self, device: Any):
            super().__init__()

    class Event:  # which times a step
        def __init__(self, *_: Any, **__: Any):
            self._time = time.perf_counter()

        def record(self, *_: Any) -> None:
            self._time = time.perf_counter()

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            return float(1e3 * (end._time - self._time))

    return {
        "Event": Event,
        "current_device": cuda.current_device,
        "set_device": cuda.set_device,
        "device": OneDevice,
        **{f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in _TENSOR_TYPES},
        **dict.fromkeys(_NOTHING_TO_DO, lambda *_, **__: None),
        **{name: told(name) for name in facts},
    }


@contextlib.contextmanager
def _attention_replaced(mapped: Mapped) -> Iterator[None]:
    """Let a model be made of a configuration whose attention needs a GPU."""
    from transformers import PreTrainedModel

    original = PreTrainedModel._from_config.__func__

    def from_config(cls: type, config: Any, **options: Any) -> Any:
        mapped.attention(config, options)
        return original(cls, config, **options)

    with mock.patch.object(PreTrainedModel, "_from_config", classmethod(from_config)):
        yield


@contextlib.contextmanager
def _loading_replaced(mapped: Mapped) -> Iterator[None]:
    """Let a file be read whose tensors were saved on a GPU, or are to be put there."""
    original = torch.load

    @functools.wraps(original)
    def load(file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {saved: str(mapped.device(place)) for saved, place in map_location.items()}
        elif map_location is None:
            map_location = lambda storage, saved: storage if mapped.device(saved) is not saved else None  # noqa: E731
        elif not callable(map_location):
            map_location = mapped.device(map_location)
        return original(file, map_location, *args, **options)

    with mock.patch.object(torch, "load", load):
        yield


@contextlib.contextmanager
def _generators_replaced(mapped: Mapped) -> Iterator[None]:
    """Let a random generator be made for a GPU; no function mode is asked for it."""
    original: Any = torch.Generator
    kind: Any = type(original)

    class AnyGenerator(kind):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=AnyGenerator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return original.__new__(cls, mapped.device(device))

    with mock.patch.object(torch, "Generator", Generator):
        yield


@contextlib.contextmanager
def _default_device_replaced(mapped: Mapped) -> Iterator[None]:
    """Let a default device be a GPU: `torch.set_default_device`, `with torch.device`, and a default type of tensors.

    The default device of this thread is afterwards what it was before.
    """
    make, set_type = DeviceContext.__init__, torch.set_default_tensor_type
    before = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)

    def make_here(context: DeviceContext, device: Any) -> None:
        make(context, mapped.device(torch.device(device)))

    def set_type_here(kind: Any) -> None:
        set_type(_tensor_type(kind))

    with (
        mock.patch.object(DeviceContext, "__init__", make_here),
        mock.patch.object(torch, "set_default_tensor_type", set_type_here),
    ):
        try:
            yield
        finally:
            if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not before:
                torch.set_default_device(before and before.device)


def _tensor_type(kind: Any) -> Any:
    """Return the type of a CPU for the name of one of CUDA's, `torch.cuda.FloatTensor`; another thing as it is."""
    return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind


class _Devices(TorchFunctionMode):
    """Every device that torch's functions are given, as `Mapped.device` says."""

    def __init__(self, mapped: Mapped):
        super().__init__()
        self._mapped = mapped

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.device:
            # a bare number names a device of the machine's accelerator, and there is none
            return function("cuda", *args) if args and isinstance(args[0], int) else function(*args, **kwargs)
        if function in (torch.Tensor.cuda, torch.Tensor.xpu):
            asked = args[1] if len(args) > 1 else kwargs.get("device")
            place = function.__name__ if asked is None else asked
            function, args, kwargs = torch.Tensor.to, (args[0], place), {}
        if function is torch.Tensor.type:
            args = (args[0], *map(_tensor_type, args[1:]))
        if function is torch.Tensor.to or function is torch._C._nn._parse_to:
            args = tuple(map(self._mapped.device, args))
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": self._mapped.device(kwargs["device"])}
        return function(*args, **kwargs)
