"""A model that lies on another device than the one it is trained on: found before training, every tensor by name.

What goes wrong: `device_map={"": torch.cuda.current_device()}`, evaluated before any process knows its rank, is GPU 0
in every process, and accelerate refuses rank 1 ("You can't train a model that has been loaded in 8-bit or 4-bit
precision on a different device ..."). One process that sees several GPUs wraps the model in nn.DataParallel instead,
whose copies of a 4-bit weight come without the quantization state, and get that of GPU 0 ("Input tensors need to be on
the same GPU ..."). One walk through the model finds both: where is each parameter, buffer, quantization state and
adapter weight, and which layer would fail first. It reads devices only, so fake and meta tensors are enough.

    report = placement.check(model, "cuda:1")
    print(report)

Upstream: TRL #2760, #2725; transformers PR #45407. Source of the first refusal: accelerate `Accelerator.prepare_model`.
"""

import collections
import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from failurelab._text import enclosing_name, first_line, list_names
from failurelab.failures.predicates import Value
from failurelab.placement.problems import accelerate_hooks, find_problems, quantized

KINDS = ("parameter", "buffer", "quantization state", "adapter weight")
_STATE = KINDS[2]
_PARTS = ("absmax", "code", "offset", "state2.absmax", "state2.code", "state2.offset")


@dataclasses.dataclass(frozen=True)
class Placed:
    """One tensor and where it is.

    Attributes:
        name: such as `model.layers.0.mlp.up_proj.weight.quant_state.absmax`.
        kind: one of KINDS.
        device: such as `cuda:0`.
    """

    name: str
    kind: str
    device: str


@dataclasses.dataclass(frozen=True)
class PlacementReport:
    """What `check` found.

    Attributes:
        device: that the model is to be trained on.
        tensors: how many there are of each kind.
        elsewhere: those on another device, in the order in which a forward pass meets them.
        first_to_fail: the first layer whose own tensors do not fit its input; "" if none. Layers that accelerate's
            hooks bring their input to (a model split by a device map) do not fail.
        why: what does not fit there.
        problems: other ones, a sentence each that names modules and devices.
        split: whether a device map puts parts of the model on several devices.
    """

    device: str
    tensors: Mapping[str, int]
    elsewhere: tuple[Placed, ...]
    first_to_fail: str
    why: str
    problems: tuple[str, ...]
    split: bool = False

    @property
    def local(self) -> bool:
        """Whether every tensor is on the device and nothing else is wrong."""
        return not (self.elsewhere or self.problems)

    @property
    def figures(self) -> dict[str, Value]:
        """What the registry's F5 and F6 are about; layers that a device map splits on purpose count where they fail."""
        elsewhere = self.elsewhere if self.first_to_fail or not self.split else ()
        return {
            "models_loaded": 1,
            "models_in_4bit": int(self.tensors.get(_STATE, 0) > 0),
            "tensors_elsewhere": len(elsewhere),
            "quantization_elsewhere": sum(placed.kind == _STATE for placed in elsewhere),
            "placement_problems": len(self.problems),
        }

    def __str__(self) -> str:
        total = sum(self.tensors.values())
        if not self.elsewhere:
            lines = [f"all {total} tensors of the model are on {self.device}"]
        else:
            lines = [f"{len(self.elsewhere)} of {total} tensors are not on {self.device}:"]
            for kind in KINDS:
                of_kind = [placed for placed in self.elsewhere if placed.kind == kind]
                if of_kind:
                    devices = collections.Counter(placed.device for placed in of_kind)
                    counts = ", ".join(f"{count} on {device}" for device, count in devices.items())
                    lines.append(f"  {kind}: {counts} ({list_names([placed.name for placed in of_kind])})")
        if self.first_to_fail:
            lines.append(f"  the first layer to fail: {self.first_to_fail} ({self.why})")
        lines += [f"  {problem}" for problem in self.problems]
        if not self.local:
            lines.append(
                "Next: load each process's model where that process trains, "
                "AutoModelForCausalLM.from_pretrained(..., device_map=placement.local_device_map())."
            )
        return "\n".join(lines)


def local_device_map() -> dict[str, str]:
    """Return a device map that puts the whole model where this process trains: `{"": "cuda:1"}`, or `{"": "cpu"}`.

    It asks accelerate, which asks the launcher (`accelerate launch`, torchrun), so the answer is right before a trainer
    exists, and where a scheduler shows each process one GPU, which is number 0 in all. Source: accelerate
    `PartialState`; its first use in a launched process starts the process group, as the trainer's own does.
    """
    from accelerate import PartialState

    return {"": str(PartialState().device)}


def check(model: nn.Module, device: str | int | torch.device, *, visible: int | None = None) -> PlacementReport:
    """Compare where every tensor of a model is with the device that it is to be trained on; change nothing.

    Args:
        model: plain, quantized, PEFT, wrapped; real, fake or meta tensors.
        device: such as `"cuda:1"`, or the index of an accelerator.
        visible: how many GPUs this process sees; by default torch is asked. More than one in a process of its own means
            nn.DataParallel.

    Raises:
        ValueError: `device` is no device.
    """
    home = resolve(device)
    execution_devices = _execution_devices(model, home)
    adapters = _adapter_names(model)
    tensors: collections.Counter[str] = collections.Counter()
    elsewhere, problems = [], []
    first, why = "", ""
    seen: set[int] = set()
    for name, module in _in_order(model):
        wanted = execution_devices[enclosing_name(name, execution_devices) or ""]
        for placed, tensor in _own_tensors(name, module, adapters):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            tensors[placed.kind] += 1
            if same(tensor.device, home):
                continue
            elsewhere.append(placed)
            harmless = _moves_itself(module) or (tensor.dim() == 0 and tensor.device.type == "cpu")
            if not first and not harmless and not same(tensor.device, wanted):
                first = name or type(model).__name__
                why = (
                    f"{type(module).__name__}: {placed.kind} {placed.name.removeprefix(name + '.')} is on "
                    f"{placed.device}, and its input would be on {wanted}"
                )
    problems += find_problems(model, home)
    in_4bit = any(quantized(parameter) == 4 for parameter in model.parameters())
    if visible is None:
        visible = torch.cuda.device_count() if home.type == "cuda" and torch.cuda.is_available() else 1
    alone = int(os.environ.get("WORLD_SIZE", "1") or 1) <= 1
    if visible > 1 and alone and in_4bit and not getattr(model, "is_model_parallel", False):
        problems.append(
            f"this process sees {visible} GPUs and was started alone: a trainer wraps the model in nn.DataParallel, "
            "whose copies lose the quantization state of 4-bit weights. Next: accelerate launch, one process for each "
            "GPU, or CUDA_VISIBLE_DEVICES=0"
        )
    return PlacementReport(
        str(home),
        {kind: tensors[kind] for kind in KINDS if tensors[kind]},
        tuple(elsewhere),
        first,
        why,
        tuple(problems),
        len(set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))) > 1,
    )


def resolve(device: str | int | torch.device) -> torch.device:
    """Return a device with its index: an integer counts accelerators, and `cuda` is the current one.

    Raises:
        ValueError: it is no device.
    """
    try:
        if isinstance(device, int):
            accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
            return torch.device(accelerator.type if accelerator is not None else "cuda", device)
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{device!r} is no device: {first_line(error)}") from error
    if resolved.index is None and resolved.type not in ("cpu", "meta", "mps"):
        current = torch.cuda.current_device() if resolved.type == "cuda" and torch.cuda.is_initialized() else 0
        return torch.device(resolved.type, current)
    return resolved


def same(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are one; a device without an index is the first of its type."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _moves_itself(module: nn.Module) -> bool:
    """Whether a module brings its buffer to its input, as rotary embeddings of transformers do from 4.49 on."""
    if not type(module).__name__.endswith("RotaryEmbedding"):
        return False
    try:
        lines = inspect.getsource(inspect.unwrap(type(module).forward)).splitlines()
    except (OSError, TypeError):
        return False
    return any("inv_freq" in line and ".to(" in line and "x.device" in line for line in lines)


def _in_order(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules as a forward pass of transformers meets them, which is not quite how they are registered."""
    ordered: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        ordered.append((name, module))
        children = dict(module.named_children())
        for part in sorted(children, key=lambda part: _rank(part, list(children))):
            visit(f"{name}.{part}" if name else part, children[part])

    visit("", model)
    return ordered


def _rank(part: str, siblings: list[str]) -> float:
    """Return the place of a child among its siblings: a norm comes before what it feeds, rotary before the layers."""
    before = {"rotary_emb": "layers", "input_layernorm": siblings[0], "post_attention_layernorm": "mlp"}.get(part)
    if before in siblings and before != part:
        return siblings.index(before) - 0.5
    return siblings.index(part)


def _own_tensors(name: str, module: nn.Module, adapters: set[str]) -> Iterator[tuple[Placed, torch.Tensor]]:
    prefix = name + "." if name else ""
    for part, parameter in module._parameters.items():
        if parameter is None:
            continue
        full = prefix + part
        kind = "adapter weight" if full in adapters else "parameter"
        yield Placed(full, kind, str(parameter.device)), parameter
        for path, tensor in _state_tensors(module, parameter):
            yield Placed(f"{full}.{path}", "quantization state", str(tensor.device)), tensor
    for part, buffer in module._buffers.items():
        if buffer is not None:
            yield Placed(prefix + part, "buffer", str(buffer.device)), buffer


def _state_tensors(module: nn.Module, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a quantized weight needs to mean anything: 4-bit scales and code, 8-bit column scales."""
    state = getattr(weight, "quant_state", None)
    if state is None and (quantized(weight) == 4 or weight.dtype == torch.uint8):
        state = getattr(module, "quant_state", None)  # what bitsandbytes puts back in the forward pass
    for path in _PARTS if state is not None else ():
        value: Any = state
        for part in path.split("."):
            value = getattr(value, part, None)
        if isinstance(value, torch.Tensor):
            yield f"quant_state.{path}", value
    if quantized(weight) == 8:
        for path in ("CB", "SCB"):
            value = getattr(weight, path, None)
            if isinstance(value, torch.Tensor) and value is not weight.data:
                yield path, value


def _adapter_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that PEFT has added; its layers name them, so PEFT is not imported."""
    names = set()
    for name, module in model.named_modules():
        if not hasattr(module, "adapter_layer_names") and type(module).__name__ != "ModulesToSaveWrapper":
            continue
        for part in (*getattr(module, "adapter_layer_names", ()), "modules_to_save"):
            child = getattr(module, part, None)
            prefix = f"{name}.{part}" if name else part
            if isinstance(child, nn.Module):
                names |= {f"{prefix}.{inner}" for inner, _ in child.named_parameters()}
            elif isinstance(child, nn.Parameter):
                names.add(prefix)
    return names


def _execution_devices(model: nn.Module, home: torch.device) -> dict[str, torch.device]:
    """Return the devices that inputs arrive on: by the names of modules, each for what is inside it, too."""
    devices = {"": home}
    for name, module in model.named_modules():
        for hook in accelerate_hooks(module):
            if getattr(hook, "execution_device", None) is not None:
                devices[name] = resolve(hook.execution_device)
    return devices
