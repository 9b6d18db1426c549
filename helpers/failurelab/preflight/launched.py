"""Judged by the arguments of the load and of the launch: engine under ZeRO-3 (F4), 4-bit placement (F5, F6).

The run itself is one process here. The rules are those of the registry, by versions; `failurelab.simulate` and the
notebooks 06 and 07 show them.
"""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from failurelab.preflight.findings import Answer, Finding, Held, Load, NotChecked, Seen

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def judge(seen: Seen) -> Iterator[Answer]:
    """Yield answers to F4, F5 and F6."""
    yield _engine(seen)
    yield from judge_loads(seen)


def judge_loads(seen: Seen) -> Iterator[Answer]:
    """Yield answers to F5 and F6, which need the loads of models alone."""
    yield _ranks(seen)
    yield _one_process(seen)


def _engine(seen: Seen) -> Answer:
    if seen.zero_stage < 3:
        return Held(
            "F4", f"ZeRO stage {seen.zero_stage}: no parameter is partitioned" if seen.zero_stage else "no ZeRO"
        )
    kinds = {kind.__name__ for kind in type(seen.trainer).__mro__}
    if seen.evaluated:
        return Finding(
            "F4",
            "evaluate() is called before train() under ZeRO-3: train() takes over an engine without an optimizer, and "
            "its first backward pass ends in \"'NoneType' object has no attribute 'backward'\"",
            "call evaluate() after train(), or failurelab.zero3.release_evaluation_engine(trainer) between the two",
        )
    if "GRPOTrainer" in kinds and Version("0.15") <= _version("trl") < Version("0.16"):
        return Finding(
            "F4",
            f"ZeRO-3 and GRPOTrainer of trl {_version('trl')}, which hands the bare model to generation: ZeRO-3's "
            "hooks stay on, and each token gathers every layer again (by versions; no engine runs here)",
            "trl 0.16 or later; or generate under failurelab.zero3.generation_model(trainer)",
        )
    if own := _own_code(seen.trainer):
        return NotChecked(
            "F4",
            f"{own}, of the script's own, may take the bare model for ZeRO-3's engine, and no engine runs here: "
            "guards.EngineGuard(trainer) watches it",
        )
    return Held("F4", f"ZeRO-3, and trl {_version('trl')} hands its engine to generation (by versions)")


def _own_code(trainer: Any) -> str:
    """Return the names of the trainer's class and of its callbacks that are in no library; empty if all are."""
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", [])
    kinds = [type(trainer), *(kind if isinstance(kind, type) else type(kind) for kind in callbacks)]
    libraries = ("accelerate", "failurelab", "transformers", "trl")
    return ", ".join(kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] not in libraries)


def _ranks(seen: Seen) -> Answer:
    """Judge where each rank loads a model: on the device that it trains on, or not."""
    if seen.world_size < 2:
        return Held("F5", "one process: its device is the first that it sees")
    for load in seen.loads:
        place = _place(load, seen.world_size)
        if place is None:
            continue
        what = f"a {load.bits}-bit model" if load.bits else "a model"
        newer = load.bits and _version("transformers") >= Version("5")
        moved = "it is then moved in silence, after all of them have filled GPU 0" if newer else (
            "accelerate refuses to train it: \"You can't train a model that has been loaded ... on a different device\""
        )  # fmt: skip
        return Finding(
            "F5",
            f"{what} ({load.name}) is loaded with device_map={_shown(load.device_map)}, and the last of "
            f"{seen.world_size} processes puts it on {place}, though it trains on GPU {seen.world_size - 1}; {moved}",
            "device_map={'': PartialState().local_process_index}, with `from accelerate import PartialState`",
        )
    count = sum(1 for load in seen.loads if load.bits or load.device_map is not None)
    return Held(
        "F5", f"each of {seen.world_size} processes loads on its own device ({count} loads name one or quantize)"
    )


def _place(load: Load, world_size: int) -> str | None:
    """Return where the last rank puts a model, if that is not its own GPU, in words."""
    if load.device_map is None:
        # transformers takes the current device for a quantized model
        return "GPU 0, for no process knew its device yet" if load.bits and load.early else None
    if isinstance(load.device_map, str) and load.device_map in _AUTOMATIC:
        return "all GPUs that it sees"
    values = load.device_map.values() if isinstance(load.device_map, dict) else [load.device_map]
    places = {str(value).removeprefix("cuda:") for value in values}
    if len(places) > 1:
        return f"{len(places)} devices"
    place = places.pop()
    return f"GPU {place}" if place.isdigit() and int(place) != world_size - 1 else None


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, (dict, int)) else repr(value)


def _one_process(seen: Seen) -> Answer:
    four = [load for load in seen.loads if load.bits == 4]
    if not four:
        return Held("F6", "no model is loaded in 4 bit")
    if seen.world_size > 1:
        return Held("F6", f"one process for each GPU ({seen.world_size})")
    if _version("transformers") >= Version("5.6"):
        return Held("F6", f"transformers {_version('transformers')} wraps no 4-bit model into DataParallel")
    if seen.gpus is None:
        return NotChecked(
            "F6",
            "a 4-bit model in one process fails if that process sees several GPUs, and this machine has none. "
            "Next: CUDA_VISIBLE_DEVICES as the run will have it, or --world-size",
        )
    if seen.gpus < 2:
        return Held("F6", "the process sees one GPU")
    if any(isinstance(load.device_map, str) and load.device_map in _AUTOMATIC for load in four):
        return Held("F6", f"device_map={four[0].device_map!r} in one process splits the model by layers")
    loud = 'installed bitsandbytes raises "Input tensors need to be on the same GPU"'
    if _version("bitsandbytes") >= Version("0.46"):
        loud = "this bitsandbytes has no check for that, and computes with the scales of another GPU"
    return Finding(
        "F6",
        f"{four[0].name} in 4 bit, one process, {seen.gpus} visible GPUs: Trainer wraps it into DataParallel, whose "
        f"replicas have no scales of their own; {loud}",
        "one process for each GPU (accelerate launch, torchrun), or one visible GPU (CUDA_VISIBLE_DEVICES=0)",
    )


def _version(package: str) -> Version:
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Version("0")
