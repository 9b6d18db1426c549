"""F5: a model that is loaded on another device than it trains on, judged by the arguments of load and launch.

On rank 0 a wrong map looks right, so the answer is that of the last rank that runs. `failurelab.simulate` and notebook
07 show what the ranks do.
"""

import dataclasses
from collections.abc import Iterator

from packaging.version import Version

from failurelab_preflight.finding import Finding
from failurelab_preflight.judges.rows import installed_version
from failurelab_preflight.repairs import Keyword
from failurelab_preflight.training import Load, Training

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def judge_four_bit_placement(training: Training) -> Iterator[Finding]:
    """Judge where each rank loads a model, which needs the loads alone: on the device that it trains on, or not."""
    yield _judge_ranks(training)


def _judge_ranks(training: Training) -> Finding:
    if training.world_size < 2:
        return Finding.not_applicable("F5", "one process: its device is the first that it sees")
    own = training.world_size - 1 if training.device is None else training.device
    for number, load in enumerate(training.loads):
        place = _place(load, own)
        if place is None:
            continue
        what = f"a {load.bits}-bit model" if load.bits else "a model"
        newer = load.bits and installed_version("transformers") >= Version("5")
        moved = "it is then moved in silence, after all of them have filled GPU 0" if newer else (
            "accelerate refuses to train it: \"You can't train a model that has been loaded ... on a different device\""
        )  # fmt: skip
        own_device, imports = '{"": str(PartialState().device)}', "from accelerate import PartialState"
        return Finding(
            "F5",
            f"{what} ({load.name}) is loaded with device_map={load.device_map!r}, and the last process "
            f"puts it on {place}, though it trains on GPU {own}; {moved}",
            f"device_map={{'': str(PartialState().device)}}, with `{imports}`",
            undo=None if load.by_trainer else Keyword("load", "device_map", own_device, index=number, imports=imports),
            part=f"from_pretrained[{number}]",
        )
    if training.asks_for_gpus:
        why = "the script asks whether GPUs are here, and what it does where there are some was not seen"
        return Finding.not_checked("F5", why)
    named = [load for load in training.loads if load.bits or load.device_map is not None]
    if not named:
        return Finding.not_applicable("F5", "no load names a device or quantizes, so the trainer moves the model")
    other = 0 if own else 1
    planted = [_place(dataclasses.replace(load, device_map={"": other}), own) for load in named]
    return Finding.held(
        "F5",
        f"the last process loads on its own device ({len(named)} loads name one or quantize)",
        f"with device_map={{'': {other}}} it would be {planted[0]}",
    )


def _place(load: Load, own: int) -> str | None:
    """Return where the last rank puts a model, if that is not its own GPU, in words."""
    if load.device_map is None:
        # transformers takes the current device for a quantized model
        return "GPU 0, for no process knew its device yet" if load.bits and load.early and own else None
    if isinstance(load.device_map, str) and load.device_map in _AUTOMATIC:
        return "all GPUs that it sees"
    values = load.device_map.values() if isinstance(load.device_map, dict) else [load.device_map]
    places = {str(value).removeprefix("cuda:").replace("cuda", "0") for value in values}
    if len(places) > 1:
        return f"{len(places)} devices"
    place = places.pop()
    return f"GPU {place}" if place.isdigit() and int(place) != own else None
