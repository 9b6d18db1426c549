"""The kind `placement`: a script that loads models, run as each rank of a simulated node with two devices.

The lab names the function, `load_model(model_path, rank)` or `load_models(model_path, rank)`; it returns a model, or
several. For each rank the script is imported anew, as its process would, while the current device is number 0; it
becomes the rank's own when the script first asks accelerate for its state, as on a real node. `from_pretrained` is
replaced for that time: it works out the device map as transformers does, and gives a model of that shape on simulated
devices, in 4 bit if asked for. What comes back is handed to accelerate's own `prepare_model`, and to `placement.check`.
"""

import os
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import transformers

from failurelab import placement, simulate
from failurelab.placement.dtypes import quantized
from failurelab_course.labs.checker.base import Refused, Run, import_script
from failurelab_course.labs.metrics import PLACEMENT

RANKS = 2


def measure(script: types.ModuleType, run: Run) -> None:
    """Run the script's function as every rank, and fill in `run.metrics`.

    Raises:
        Refused: there is no such function, or it returns another model.
    """
    signature = f"{run.trainer_class}(model_path, rank)"
    run.function(script, signature)
    simulate.devices(RANKS)
    backend = getattr(torch, simulate.NAME)
    metrics = run.metrics
    metrics |= dict.fromkeys(PLACEMENT, 0) | {"refusal": "", "placement_refused": None}
    run.stage = "build"
    for rank in range(RANKS):
        backend.set_device(0)
        with loading(backend):
            fresh = import_script(script.__file__)
            with simulate.ranks(RANKS, rank) as accelerator:
                backend.set_device(0)
                with _selects_device(rank), _launched(rank):
                    returned = run.function(fresh, signature)(str(run.model_path), rank)
                models = returned if isinstance(returned, tuple | list) else (returned,)
                _judge(models, rank, accelerator, run)
    metrics["placement_refused"] = metrics["ranks_refused"] > 0


def _judge(models: Any, rank: int, accelerator: Any, run: Run) -> None:
    """Ask accelerate and `placement.check` about what one rank has loaded."""
    metrics, refused = run.metrics, False
    for model in models:
        metrics["devices_used"] = max(metrics["devices_used"], count_loaded(model, f"rank {rank} loaded", run))
        count_elsewhere(model, torch.device(simulate.NAME, rank), metrics)
        try:
            accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        except ValueError as error:
            refused = True
            metrics["refusal"] = metrics["refusal"] or str(error).splitlines()[0]
    metrics["ranks_refused"] += refused


def count_loaded(model: Any, who: str, run: Run) -> int:
    """Count a model that a rank has loaded; return on how many devices it is.

    Raises:
        Refused: it is not the model that the script was given; says `who` has loaded it.
    """
    wanted = {name for name in run.start if not name.endswith("lm_head.weight")}
    names = {name for name, _ in model.named_parameters()} if isinstance(model, torch.nn.Module) else set()
    if not wanted <= names | {name for name, _ in getattr(model, "named_buffers", tuple)()}:
        raise Refused(f"{who} a {type(model).__name__} that is not the model in model_path")
    run.metrics["models_loaded"] += 1
    run.metrics["models_in_4bit"] += any(quantized(parameter) == 4 for parameter in model.parameters())
    return len({str(parameter.device) for parameter in model.parameters()})


def count_elsewhere(model: torch.nn.Module, device: torch.device, metrics: dict[str, Any]) -> None:
    """Count what of a rank's model is not on its device."""
    elsewhere = placement.check(model, device, visible=1).elsewhere
    metrics["tensors_elsewhere"] += len(elsewhere)
    metrics["quantization_elsewhere"] += sum(tensor.kind == "quantization state" for tensor in elsewhere)


def _launched(rank: int) -> Any:
    """Set the variables that a launcher gives each process, for a block: a script may read its rank there."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    return mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()})


def _selects_device(rank: int) -> Any:
    """Let the first use of accelerate's state select the rank's device, for a block, as in a launched process."""
    from accelerate import PartialState

    original = PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        getattr(torch, simulate.NAME).set_device(rank)

    return mock.patch.object(PartialState, "__init__", init)


def loading(backend: Any, finish: Callable[[torch.nn.Module], None] | None = None) -> Any:
    """Let `AutoModelForCausalLM.from_pretrained` load shapes on simulated devices, for a block.

    Args:
        backend: is asked for `device_count()` and `current_device()` when a model is loaded: `torch.sim`, `torch.cuda`.
        finish: is given each model before the script gets it.
    """

    def from_pretrained(path: Any, *args: Any, device_map: Any = None, **options: Any) -> torch.nn.Module:
        config = options.get("quantization_config")
        in_4bit = bool(getattr(config, "load_in_4bit", False))
        model = simulate.model(str(path))
        if in_4bit:
            simulate.four_bit(model)
        places = _resolved(device_map, model, in_4bit, backend)
        simulate.place(model, places)
        if device_map is not None or in_4bit:
            model.hf_device_map = places
        if finish is not None:
            finish(model)
        return model

    return mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)


def _resolved(device_map: Any, model: torch.nn.Module, in_4bit: bool, backend: Any) -> dict[str, Any]:
    """Return the map as transformers makes it: from nothing, one device, a word, or a mapping."""
    if device_map is None:  # in 4 bit the quantizer chooses the current device
        return {"": backend.current_device() if in_4bit else "cpu"}
    if isinstance(device_map, str) and device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        from accelerate import infer_auto_device_map

        count = backend.device_count()
        if count < 2:
            return {"": 0}
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        room = dict.fromkeys(range(count), int(size * 0.7))
        inferred = infer_auto_device_map(model, max_memory=room, no_split_module_classes=["Qwen2DecoderLayer"])
        return {name: place if isinstance(place, int) else count - 1 for name, place in inferred.items()}
    return dict(device_map) if isinstance(device_map, dict) else {"": device_map}
