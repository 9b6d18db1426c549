"""The kind `node`: a script that is started by a command of its own, on a simulated node with two GPUs.

The script says how it is started, `COMMAND = "python train.py"`, and defines `prepare(model_path, output_dir)`, which
returns the model and the trainer's config, made as one process makes them. The command is read by the launchers' own
parsers, and each process it starts imports the script anew and calls the function. `from_pretrained` gives a model of
that shape on fake `cuda` devices. What is said about it are the libraries' own words:

- transformers' `Trainer` is made of model and config, and decides whether nn.DataParallel is wrapped around them;
- torch's own `replicate` makes the copies, fake ones, and bitsandbytes' layers are given what they are on a GPU;
- accelerate's `prepare_model` judges the model;
- every 4-bit layer of every copy runs, with many rows as in training and with one as in generation for one prompt. A
  layer whose tensors are not together is refused by bitsandbytes (up to 0.45) or torch; one that is not is stopped
  right after the check, at its native kernel.

The tier is `simulated`: no number is computed.
"""

import importlib
import importlib.util
import logging
import sys
import types
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

from failurelab import simulate
from failurelab.placement.problems import quantized
from failurelab.simulate import loads
from failurelab.simulate import node as simulated_node
from failurelab.simulate.cuda import Cuda
from failurelab_course.labs.checker.base import CheckRun, Refused, import_script
from failurelab_course.labs.checker.kinds.placement import count_elsewhere, count_loaded, is_refused, loading
from failurelab_course.labs.metrics import NODE, PLACEMENT

GPUS = 2
_TOGETHER = ("need to be on the same GPU", "to be on the same device")  # bitsandbytes' words, and torch's


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Start the script's command on the node, and fill in `run.metrics`.

    Raises:
        Refused: there is no such function or command, or it returns another model.
    """
    signature = f"{run.trainer_class}(model_path, output_dir)"
    run.function(script, signature)
    try:
        what = simulated_node.started(getattr(script, "COMMAND", ""), GPUS)
    except simulated_node.CommandError as error:
        raise Refused(f"COMMAND: {error}") from error
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # no native library is needed, and it says it is
    for name in ("deepspeed", "bitsandbytes"):  # with GPUs at its import, a library would look for a CUDA toolkit
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    metrics = run.metrics
    metrics |= dict.fromkeys([*PLACEMENT, *NODE], 0) | {"refusal": "", "layer_refusal": "", "placement_refused": None}
    metrics["processes"] = what.count
    run.stage = "build"
    for rank in range(what.count):
        with simulated_node.process(what, rank, GPUS) as cuda, loading(torch.cuda, lambda model: _loaded(model, cuda)):
            fresh = import_script(script.__file__)
            returned = run.function(fresh, signature)(str(run.model_path), str(run.output_dir))
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise Refused(f"{signature} returned a {type(returned).__name__}, and not the model and the config")
            _judge(*returned, rank, run)
            metrics["devices_seen"] = max(metrics["devices_seen"], cuda.device_count())
    metrics["placement_refused"] = metrics["ranks_refused"] > 0


def _loaded(model: nn.Module, cuda: Cuda) -> None:
    """Make a loaded model what transformers makes of it on GPUs."""
    for parameter in model.parameters():
        if parameter.device.type == "cuda":
            cuda.use(parameter.device.index or 0)
    if getattr(model, "is_loaded_in_4bit", False):
        loads.mark_as_4bit(model, model.hf_device_map)

    def to(*args: Any, **options: Any) -> nn.Module:
        where = options.get("device", args[0] if args and not isinstance(args[0], torch.dtype) else None)
        if where is not None:
            where = torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
            where = torch.device("cuda", cuda.current) if where.type == "cuda" and where.index is None else where
            if where.type == "cuda":
                cuda.use(where.index)
            _move(model, where)
        return model

    model.to = to
    model.cuda = lambda device=None: to("cuda" if device is None else device)


def _move(model: nn.Module, device: torch.device) -> None:
    """Move a model as its layers do: of a 4-bit weight, bitsandbytes moves what its own `QuantState.to` moves."""
    moved: dict[int, torch.Tensor] = {}
    with simulate.fake():
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in moved:
                        moved[id(tensor)] = _moved(tensor, device)
                    table[name] = moved[id(tensor)]


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    there = torch.empty_like(tensor.detach(), device=device)
    if not isinstance(tensor, nn.Parameter):
        return there
    there = nn.Parameter(there, requires_grad=tensor.requires_grad)
    if (state := getattr(tensor, "quant_state", None)) is not None:
        state.to(device)
        there.quant_state, there.bnb_quantized = state, True
    return there


def _judge(model: Any, config: Any, rank: int, run: CheckRun) -> None:
    """Ask transformers, accelerate, bitsandbytes and `placement.check` about what one process has prepared."""
    metrics = run.metrics
    used = count_loaded(model, f"rank {rank} prepared", run)
    if not isinstance(config, transformers.TrainingArguments):
        raise Refused(f"rank {rank} prepared a {type(config).__name__} that is no trainer's config")
    if isinstance(getattr(model, "hf_device_map", None), dict):  # the script may have written one
        model.hf_device_map = loads.name_devices(model.hf_device_map)
    trainer = transformers.Trainer(model=model, args=config)
    wrapped = trainer._wrap_model(trainer.model_wrapped)
    home = trainer.accelerator.device
    if isinstance(wrapped, nn.DataParallel):
        metrics["data_parallel"] += 1
        copies = _replicas(wrapped)
    else:
        copies = [(model, home)]
        metrics["ranks_refused"] += is_refused(trainer.accelerator, model, metrics)
    metrics["copies"] += len(copies)
    metrics["devices_used"] = max(metrics["devices_used"], used, len(copies))
    for copy, device in copies:
        count_elsewhere(copy, device, metrics)
        for rows, name in ((3, "layers_refused"), (1, "layers_refused_single")):
            said = [_refused(layer, rows) for layer in copy.modules() if _in_4bit(layer)]
            metrics[name] += sum(bool(refusal) for refusal in said)
            metrics["layer_refusal"] = metrics["layer_refusal"] or next((refusal for refusal in said if refusal), "")


def _in_4bit(module: nn.Module) -> bool:
    return quantized(module._parameters.get("weight")) == 4


def _refused(layer: nn.Module, rows: int) -> str:
    """Return why a layer refuses an input that is where its weight is, in bitsandbytes' or torch's words; or ""."""
    dtype = getattr(layer, "compute_dtype", None) or torch.bfloat16
    try:
        with simulate.fake(), torch.no_grad():
            layer(torch.empty(rows, layer.in_features, dtype=dtype, device=layer.weight.device))
    except Exception as error:  # past the check is the native kernel, and a fake tensor may end there in anything
        said = str(error)
        return said.splitlines()[0].rstrip() if any(words in said for words in _TOGETHER) else ""
    return ""


def _replicas(wrapped: nn.DataParallel) -> list[tuple[nn.Module, torch.device]]:
    """Return DataParallel's copies and their devices, made by torch's `replicate` of fake tensors."""

    def broadcast(tensors: Any, devices: Any, detach: bool = False) -> list[list[torch.Tensor]]:
        """Copy fake tensors, for which there is no broadcast. Attributes are lost as ever."""
        with simulate.fake():
            return [[torch.empty_like(tensor.detach(), device=f"cuda:{at}") for tensor in tensors] for at in devices]

    with mock.patch.object(sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", broadcast):
        copies = wrapped.replicate(wrapped.module, wrapped.device_ids)
    replicas = []
    for copy, index in zip(copies, wrapped.device_ids):
        for module in copy.modules():
            for name, tensor in module._former_parameters.items():
                vars(module).pop(name, None)
                parameter = module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
                # what bitsandbytes does first in a forward pass: the lost state is taken from the module
                if name == "weight" and tensor.dtype == torch.uint8 and hasattr(module, "quant_state"):
                    parameter.quant_state = module.quant_state
        replicas.append((copy, torch.device("cuda", index)))
    return replicas
