"""A device map judged before a model is loaded by it: devices that are not there, modules without a place, torn heads.

What goes wrong: a map is only as good as the moment and the process that made it. `from_pretrained` ends in a KeyError,
an out-of-memory error or a CUDA message five libraries down, or loads happily what no trainer will train. Every such
map can be told from the names of the model's modules and the number of devices.

Sources: accelerate `check_device_map`, `Accelerator.prepare_model`, `Accelerator.verify_device_map`.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
_NAMED = 3


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
    available = _available() if available is None else available
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


def _available() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _place(value: Any) -> str:
    """Return a place in one spelling: an integer counts accelerators, whatever their type is called."""
    if isinstance(value, str) and value in ("cpu", "disk", "meta", "mps"):
        return value
    if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
        return f"accelerator {int(value)}"
    found = torch.device(value)
    return found.type if found.type in ("cpu", "meta", "mps") else f"accelerator {found.index or 0}"


def _some(names: list[str]) -> str:
    named = [name or "the whole model" for name in names]
    rest = len(named) - _NAMED
    return ", ".join(named[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _unknown_modules(places: Mapping[str, Any], model: nn.Module) -> list[str]:
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    unknown = [name for name in places if name not in modules]
    problems = []
    if unknown:
        near = [name for name in modules if name and "." not in name] or ["''"]
        problems.append(
            f"the map names {_some(unknown)}, which {type(model).__name__} does not have. Next: its modules begin with "
            f"{', '.join(sorted(near))}; '' is the whole model"
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    homeless = [name for name in names if _of(name, places) is None]
    if homeless and not unknown:
        problems.append(
            f"{len(homeless)} parameters have no place in the map ({_some(homeless)}). Next: add their modules, or "
            "'' for all that is not named"
        )
    return problems


def _of(name: str, places: Mapping[str, Any]) -> str | None:
    """Return the entry that decides about a name: the longest that it begins with."""
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def _absent_devices(places: Mapping[str, Any], available: int) -> list[str]:
    problems = []
    for place in dict.fromkeys(map(str, places.values())):
        names = [name for name, value in places.items() if str(value) == place]
        value = places[names[0]]
        try:
            spelled = _place(value)
        except (RuntimeError, TypeError):
            problems.append(
                f"{value!r} is no device, and the map puts {_some(names)} there. Next: an index, 'cpu', ..."
            )
            continue
        if spelled.startswith("accelerator") and int(spelled.split()[1]) >= available:
            there = f"0 to {available - 1}" if available else "none at all"
            problems.append(
                f"the map puts {_some(names)} on {value!r}, and this process sees {available} accelerators ({there}). "
                "Next: placement.local_device_map(), or CUDA_VISIBLE_DEVICES"
            )
    return problems


def _torn(places: Mapping[str, Any], model: nn.Module) -> list[str]:
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return []
    names = {id(module): name for name, module in model.named_modules()}
    try:
        pair = [names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]]
    except (KeyError, AttributeError, NotImplementedError):
        return []
    where = [_place(places[_of(name, places)]) for name in pair]
    if where[0] == where[1]:
        return []
    return [
        f"{pair[1]} on {where[1]} is tied to {pair[0]} on {where[0]}: one tensor cannot be in two places, and two "
        "would be trained apart. Next: map both to one device"
    ]


def _offload(places: Mapping[str, Any], device: Any) -> list[str]:
    names = [name for name, value in places.items() if _place(value) in ("cpu", "disk")]
    if not names or (_place(device) == "cpu" and not any(_place(places[name]) == "disk" for name in names)):
        return []
    return [
        f"{_some(names)} would be offloaded to the CPU or to disk: weights come in for a forward pass only, and "
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
