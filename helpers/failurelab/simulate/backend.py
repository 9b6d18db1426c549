"""Several accelerators on a machine that has none: placement and errors of models of any size, without numbers.

Most learners have no second GPU, and the failures of placement need two. torch can register a device type whose
kernels compute nothing (its Python backend, an experimental interface), and fake tensors have a shape, a dtype and a
device but no data. Together they run a Qwen2-72B's forward and backward pass on a laptop.

    simulate.devices(2)                                   # once, in a process of its own
    model = simulate.place(simulate.model(config), {"": 0})
    with simulate.fake():
        model(simulate.tokens(4, 1024), use_cache=False)

Two ways, and what each cannot do:

- `devices(n)` registers the type `sim`. Forward, backward, and accelerate's own checks run. It holds for the process
  and makes `sim` the accelerator of all libraries in it: use a child process. The number cannot change later. Backward
  passes run on the calling thread (`torch.autograd.set_multithreading_enabled`).
- Without it, integers are fake `cuda` devices: libraries that ask `tensor.is_cuda`, such as bitsandbytes, give their
  real errors. Only forward passes without gradients: a backward pass aborts the process on a CPU build of torch.

Nothing is computed: no values, no control flow that depends on values, no time. A KV cache makes a real tensor, so
pass `use_cache=False`. Streams, NCCL and the memory that kernels take are not simulated.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from failurelab._text import enclosing_name, first_line
from failurelab.simulate.mode import fake
from failurelab.simulate.rank import Rank, told_to_all

NAME = "sim"
_registered = 0


class SimulationError(ValueError):
    """What is asked for cannot be simulated; the message says what was found and the next step."""


class _Backend:
    """The module `torch.sim`: what torch, accelerate and transformers ask of a device's backend."""

    def __init__(self, count: int) -> None:
        self.count, self.current = count, 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: Any) -> None:
        self.current = device if isinstance(device, int) else torch.device(device).index or 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def devices(n: int) -> list[torch.device]:
    """Register n simulated accelerators, `sim:0` to `sim:n-1`, for the rest of this process; return them.

    Raises:
        SimulationError: another number was registered before, this machine's torch has a real accelerator in use, or n
            is no count.
    """
    global _registered
    if n < 1:
        raise SimulationError(f"{n} devices cannot be simulated. Next: give 1 or more")
    if _registered not in (0, n):
        raise SimulationError(
            f"this process has {_registered} simulated devices, and torch registers a device type once: {n} are not to "
            "be had. Next: a process of its own for each number"
        )
    if not _registered:
        from torch.utils import backend_registration

        setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
        if setup is None:
            raise SimulationError(
                f"torch {torch.__version__} has no Python backend. Next: the torch that the course pins, or fake cuda "
                "devices (without simulate.devices)"
            )
        if torch.cuda.is_initialized():
            raise SimulationError(
                "a real GPU is in use in this process, and simulated devices would stand beside it. Next: a process of "
                "its own"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries would choose the real one
        setup(NAME, _Backend(n))
        # Fake tensors run Python in autograd's thread of a device. One that lets go of a Python object while the
        # process ends would abort it ("terminate called without an active exception", pytorch issue 38228), so
        # backward runs on the calling thread, as it does on a CPU anyway.
        torch.autograd.set_multithreading_enabled(False)
        _registered = n
        torch.get_device_module.cache_clear()  # it may have been asked before, and then still says the CPU
    return [torch.device(NAME, index) for index in range(n)]


def resolve(place: int | str | torch.device) -> torch.device:
    """Return a device of the simulation: an integer is `sim:i` once devices are registered, fake `cuda:i` before.

    Raises:
        SimulationError: there are fewer simulated devices, or it is no device.
    """
    if isinstance(place, int):
        place = f"{NAME}:{place}" if _registered else f"cuda:{place}"
    try:
        device = torch.device(place)
    except RuntimeError as error:
        raise SimulationError(f"{place!r} is no device here: {first_line(error)}") from error
    if device.type == NAME and (device.index or 0) >= _registered:
        raise SimulationError(
            f"{device} is not there: {_registered} simulated devices, {NAME}:0 to {NAME}:{_registered - 1}. Next: name "
            f"one of these, or register more at the start (simulate.devices({(device.index or 0) + 1}))"
        )
    return device


def model(config: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a causal language model of this shape without any numbers, to be given to `place`.

    Args:
        config: a transformers config, or a folder with a `config.json`.
        dtype: of the weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(config, str | pathlib.Path):
        config = AutoConfig.from_pretrained(config)
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(config).to(dtype)
    return made


def tokens(rows: int, length: int) -> torch.Tensor:
    """Return token ids without values, `(rows, length)`, on the first device."""
    with fake():
        return torch.empty(rows, length, dtype=torch.long, device=resolve(0))


def place(model: nn.Module, device_map: Mapping[str, int | str | torch.device]) -> nn.Module:
    """Put fake copies of a model's tensors where a device map says, in place; return the model.

    Tied weights stay one tensor, quantization states go with their weights, `requires_grad` stays. No hooks are made:
    nothing moves activations between devices, as in training.

    Args:
        model: with real, fake or meta tensors; none of its numbers are kept.
        device_map: from the names of modules to devices, as for `from_pretrained`; `""` is the whole model, and longer
            names win.

    Raises:
        SimulationError: a device that is not there, a name that is no module, modules without a place, or a tied weight
            that is mapped to two devices. The model is then as it was.
    """
    targets = {name: resolve(place) for name, place in device_map.items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in targets if name not in modules]
    if unknown:
        raise SimulationError(
            f"the device map names {unknown[0]!r}, which is no module of {type(model).__name__}. Next: names such as "
            f"{', '.join([name for name in modules if name][:4])}"
        )
    planned: dict[int, tuple[str, torch.device]] = {}
    moves = []
    for name, module in modules.items():
        around = enclosing_name(name, targets)
        target = targets[around] if around is not None else None
        for table in (module._parameters, module._buffers):
            for part, tensor in table.items():
                if tensor is None:
                    continue
                full = f"{name}.{part}" if name else part
                if target is None:
                    raise SimulationError(
                        f"the device map has no place for {full}. Next: add {name!r}, or '' for all that is not named"
                    )
                other, before = planned.setdefault(id(tensor), (full, target))
                if before != target:
                    raise SimulationError(
                        f"{full} and {other} are one tied tensor, mapped to {target} and {before}: training would go "
                        "on with two that drift apart. Next: map both modules to one device"
                    )
                moves.append((table, part, tensor, target))
    copies: dict[int, torch.Tensor] = {}
    with fake():
        for table, part, tensor, target in moves:
            if id(tensor) not in copies:
                copies[id(tensor)] = _copy(tensor, target, parameter=isinstance(tensor, nn.Parameter))
            table[part] = copies[id(tensor)]
    for module in modules.values():  # bitsandbytes keeps a second reference, which it puts back where the first is lost
        weight = module._parameters.get("weight")
        if getattr(weight, "quant_state", None) is not None and hasattr(module, "quant_state"):
            module.quant_state = weight.quant_state
    return model


def _copy(tensor: torch.Tensor, target: torch.device, parameter: bool) -> Any:
    # never from the tensor itself: a fake one cannot be read by a second mode, and a real one would be copied
    empty = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=target)
    if not parameter:
        return empty
    copied: Any = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        copied.quant_state = _copy_state(state, target)
        copied.bnb_quantized = True
    return copied


def _copy_state(state: Any, target: torch.device) -> Any:
    copied = object.__new__(type(state))
    for key, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            value = _copy(value, target, parameter=False)
        elif key == "state2" and value is not None:
            value = _copy_state(value, target)
        setattr(copied, key, value)
    return copied


@contextlib.contextmanager
def ranks(world_size: int, rank: int) -> Iterator[Any]:
    """For a block, let accelerate see this process as one rank of a node with one simulated device for each rank.

    Yields an `Accelerator` whose device is `sim:rank`. How it judges a model (`prepare_model`) is accelerate's own
    code. There is no process group: nothing is sent, and `prepare_model(..., evaluation_mode=True)` leaves out the last
    step, the wrap in DistributedDataParallel. accelerate's state is as before afterwards.

    Args:
        world_size: ranks of the node; as many devices must be registered.
        rank: which of them.

    Raises:
        SimulationError: fewer devices than ranks, or no such rank.
    """
    if world_size > _registered:
        raise SimulationError(
            f"{world_size} ranks need a device each, and {_registered} are simulated. Next: "
            f"simulate.devices({world_size}) first, in a process of its own"
        )
    if not 0 <= rank < world_size:
        raise SimulationError(f"rank {rank} is none of 0 to {world_size - 1}")
    from accelerate import Accelerator

    backend = getattr(torch, NAME)
    this = Rank(rank, world_size, world_size, NAME, launched=world_size > 1)
    with mock.patch.object(backend, "current", backend.current), told_to_all(lambda: this, backend.set_device):
        yield Accelerator()
