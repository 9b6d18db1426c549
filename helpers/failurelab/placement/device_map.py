"""A device map judged before a model is loaded by it: absent devices, modules without a place, tied heads torn apart.

What goes wrong: a map is evaluated too early, or in another process than the one that trains. Then `from_pretrained`
ends in a KeyError, an out-of-memory error or a CUDA message five libraries down, or loads without an error what no
trainer will train. The names of the model's modules and the number of devices are enough to recognize such a map.

Sources: accelerate `check_device_map`, `Accelerator.prepare_model`, `Accelerator.verify_device_map`.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from failurelab._text import enclosing_name, list_names

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


class DeviceMapError(ValueError):
    """A device map cannot be trained with; `problems` says why, a sentence each that names modules and devices."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


def check_map(
    device_map: Mapping[str, Any] | str | None,
    model: nn.Module,
    device: str | int | torch.device,
    *,
    available: int | None = None,
    processes: int | None = None,
) -> None:
    """Refuse a device map that `model` cannot be trained with by a process whose device is `device`.

    Args:
        device_map: as it would be given to `from_pretrained`.
        model: the architecture, on meta tensors is enough: `with torch.device("meta"): Model(config)`.
        device: of this process: an accelerator's index, or such as `"cuda:1"` or `"cpu"`.
        available: accelerators that this process sees; by default torch is asked.
        processes: in the launch; by default WORLD_SIZE.

    Raises:
        DeviceMapError: with every problem that was found.
    """
    if available is None:
        accelerator = getattr(torch, "accelerator", torch.cuda)  # torch before 2.6 has none
        available = accelerator.device_count() if accelerator.is_available() else 0
    processes = int(os.environ.get("WORLD_SIZE", "1") or 1) if processes is None else processes
    if isinstance(device_map, str) and device_map in _AUTOMATIC:
        if processes > 1 and available > 1:
            raise DeviceMapError(
                [
                    f"device_map={device_map!r} in {processes} processes: each would spread the whole model over all "
                    f"{available} devices that it sees, and no trainer accepts that. Next: "
                    "device_map=placement.local_device_map()"
                ]
            )
        return
    if device_map is None:
        return
    places = device_map if isinstance(device_map, Mapping) else {"": device_map}
    problems = _unknown_modules(places, model) + _absent_devices(places, available)
    if not problems:
        problems = _torn(places, model) + _offload(places, device) + _elsewhere(places, device, processes)
    if problems:
        raise DeviceMapError(problems)


def _place(value: Any) -> str:
    """Return a place in one spelling: an integer counts accelerators, whatever their type is called."""
    if value == "disk":
        return value
    if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
        return f"accelerator {int(value)}"
    device = torch.device(value)
    return device.type if device.type in ("cpu", "meta", "mps") else f"accelerator {device.index or 0}"


def _unknown_modules(places: Mapping[str, Any], model: nn.Module) -> list[str]:
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    unknown = [name for name in places if name not in modules]
    problems = []
    if unknown:
        near = [name for name in modules if name and "." not in name] or ["''"]
        problems.append(
            f"the map names {list_names(unknown)}, which {type(model).__name__} does not have. Next: its modules begin "
            f"with {', '.join(sorted(near))}; '' is the whole model"
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    homeless = [name for name in names if enclosing_name(name, places) is None]
    if homeless and not unknown:
        problems.append(
            f"{len(homeless)} parameters have no place in the map ({list_names(homeless)}). Next: add their modules, "
            "or '' for all that is not named"
        )
    return problems


def _absent_devices(places: Mapping[str, Any], available: int) -> list[str]:
    problems = []
    for value in {str(value): value for value in places.values()}.values():
        names = [name for name, other in places.items() if str(other) == str(value)]
        try:
            spelled = _place(value)
        except (RuntimeError, TypeError):
            problems.append(
                f"{value!r} is no device, and the map puts {list_names(names)} there. Next: an index, 'cpu', ..."
            )
            continue
        if spelled.startswith("accelerator") and int(spelled.split()[1]) >= available:
            visible = f"0 to {available - 1}" if available else "none at all"
            problems.append(
                f"the map puts {list_names(names)} on {value!r}, and this process sees {available} accelerators "
                f"({visible}). Next: placement.local_device_map(), or CUDA_VISIBLE_DEVICES"
            )
    return problems


def _torn(places: Mapping[str, Any], model: nn.Module) -> list[str]:
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return []
    names = {module: name for name, module in model.named_modules()}
    try:
        embeddings, head = names[model.get_input_embeddings()], names[model.get_output_embeddings()]
    except (KeyError, AttributeError, NotImplementedError):
        return []
    embeddings_place, head_place = (_place(places[enclosing_name(name, places)]) for name in (embeddings, head))
    if embeddings_place == head_place:
        return []
    return [
        f"{head} on {head_place} is tied to {embeddings} on {embeddings_place}: one tensor cannot be in two places, "
        "and two would be trained apart. Next: map both to one device"
    ]


def _offload(places: Mapping[str, Any], device: Any) -> list[str]:
    names = [name for name, value in places.items() if _place(value) in ("cpu", "disk")]
    if not names or (_place(device) == "cpu" and not any(_place(places[name]) == "disk" for name in names)):
        return []
    return [
        f"{list_names(names)} would be offloaded to the CPU or to disk: weights come in for a forward pass only, and "
        "training cannot change them. Next: keep all on one accelerator, in 4 bit if there is no room"
    ]


def _elsewhere(places: Mapping[str, Any], device: Any, processes: int) -> list[str]:
    used = sorted({_place(value) for value in places.values()} - {"cpu", "disk"})
    home = _place(device)
    if len(used) > 1 and processes > 1:
        return [
            f"the map spreads the model over {', '.join(used)}, and {processes} processes would each do so. Next: one "
            "device for each process, placement.local_device_map()"
        ]
    if len(used) == 1 and used[0] != home and home != "cpu":
        return [
            f"the map puts the whole model on {used[0]}, and this process trains on {home}. Was it made before the "
            "process knew its rank? Next: placement.local_device_map()"
        ]
    return []
