"""The kind `placement`: a script that loads models, run as each rank of a simulated node with two devices.

The lab names the function, `load_model(model_path, rank)` or `load_models(model_path, rank)`; it returns a model, or
several. For each rank the script is imported anew, as its process would, while the current device is number 0; it
becomes the rank's own when the script first asks accelerate for its state, as on a real node. `from_pretrained` is
replaced for that time: it works out the device map as transformers does, and gives a model of that shape on simulated
devices, in 4 bit if asked for. What comes back is handed to accelerate's own `prepare_model`, and to `placement.check`.
"""

import types
from collections.abc import Callable
from typing import Any

import torch

from failurelab import placement, simulate
from failurelab.placement.problems import quantized
from failurelab.simulate import loads
from failurelab.simulate.rank import Rank, told_to_all
from failurelab_course.labs.checker.base import CheckRun, Refused, import_script
from failurelab_course.labs.metrics import PLACEMENT

RANKS = 2


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Run the script's function as every rank, and fill in `run.metrics`.

    Raises:
        Refused: there is no such function, or it returns another model.
    """
    from accelerate import Accelerator

    signature = f"{run.trainer_class}(model_path, rank)"
    run.function(script, signature)
    simulate.devices(RANKS)
    backend = getattr(torch, simulate.NAME)
    metrics = run.metrics
    metrics |= dict.fromkeys(PLACEMENT, 0) | {"refusal": "", "placement_refused": None}
    run.stage = "build"
    for rank in range(RANKS):
        backend.set_device(0)
        this = Rank(rank, RANKS, RANKS, simulate.NAME)
        with loading(backend), told_to_all(lambda this=this: this, backend.set_device):
            fresh = import_script(script.__file__)
            returned = run.function(fresh, signature)(str(run.model_path), rank)
            models = returned if isinstance(returned, tuple | list) else (returned,)
            _judge(models, rank, Accelerator(), run)
    metrics["placement_refused"] = metrics["ranks_refused"] > 0


def _judge(models: Any, rank: int, accelerator: Any, run: CheckRun) -> None:
    """Ask accelerate and `placement.check` about what one rank has loaded."""
    metrics, refused = run.metrics, False
    for model in models:
        metrics["devices_used"] = max(metrics["devices_used"], count_loaded(model, f"rank {rank} loaded", run))
        count_elsewhere(model, torch.device(simulate.NAME, rank), metrics)
        refused |= is_refused(accelerator, model, metrics)
    metrics["ranks_refused"] += refused


def is_refused(accelerator: Any, model: torch.nn.Module, metrics: dict[str, Any]) -> bool:
    """Whether accelerate refuses a model; the first refusal is kept in its own words."""
    try:
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    except ValueError as error:
        metrics["refusal"] = metrics["refusal"] or str(error).splitlines()[0]
        return True
    return False


def count_loaded(model: Any, who: str, run: CheckRun) -> int:
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


def loading(devices: Any, finish: Callable[[torch.nn.Module], None] | None = None) -> Any:
    """Let `from_pretrained` load shapes on simulated devices, for a block.

    Args:
        devices: is asked for `device_count()` and `current_device()` when a model is loaded: `torch.sim`, `torch.cuda`.
        finish: is given each model before the script gets it.
    """

    def load(call: loads.Call) -> torch.nn.Module:
        device_map, config = call.options.get("device_map"), call.options.get("quantization_config")
        in_4bit = bool(getattr(config, "load_in_4bit", False))
        model = simulate.model(str(call.name))
        if in_4bit:
            simulate.four_bit(model)
        places = loads.resolve_map(device_map, model, in_4bit, devices)
        simulate.place(model, places)
        if device_map is not None or in_4bit:
            model.hf_device_map = places
        if finish is not None:
            finish(model)
        return model

    return loads.loaded_by(load)
