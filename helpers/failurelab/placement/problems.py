"""Problems of placement beyond single tensors: what `placement.check` looks for besides devices.

What goes wrong: a 4-bit weight without its scales is noise; a tied output layer that has become a tensor of its own is
trained apart from the embeddings; accelerate and trainers ask a model for 4 or 8 bit, and treat all its layers alike;
offloaded weights cannot be trained; and bitsandbytes without its native library fails in the first layer.
"""

import contextlib
import importlib.metadata
import io
import logging
from typing import Any
from unittest import mock

import torch
from torch import nn

from failurelab._text import first_line, list_names
from failurelab.placement.dtypes import quantized


def find_problems(model: nn.Module, home: torch.device) -> list[str]:
    """Return every problem of a model to be trained on `home`, a sentence each that names modules and devices."""
    return _lost_states(model) + _torn_head(model) + _two_quantizations(model) + _offloaded(model, home)


def accelerate_hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks on a module: they move its input, or bring offloaded weights in."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _lost_states(model: nn.Module) -> list[str]:
    """Find 4-bit weights that nothing can be computed from."""
    lost = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dtype != torch.uint8:
            continue
        if getattr(weight, "quant_state", None) is None and getattr(module, "quant_state", None) is None:
            lost.append(name)
    if not lost:
        return []
    return [
        f"{len(lost)} 4-bit weights have lost their quantization state ({list_names(lost)}). Next: load the model anew"
    ]


def _torn_head(model: nn.Module) -> list[str]:
    """Find an output layer that should share the embeddings' tensor and has one of its own."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return []
    try:
        base: Any = model
        head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return []
    ours, theirs = getattr(head, "weight", None), getattr(embeddings, "weight", None)
    if ours is None or theirs is None or ours is theirs:
        return []
    names = {module: name for name, module in model.named_modules()}
    return [
        f"the output layer {names.get(head, 'lm_head')} ({ours.device}) is tied to the embeddings "
        f"{names.get(embeddings, 'embed_tokens')} ({theirs.device}) by the config, and is a tensor of its own: the "
        "two would be trained apart. Next: map both to one device, then model.tie_weights()"
    ]


def _two_quantizations(model: nn.Module) -> list[str]:
    by_bits: dict[int, list[str]] = {4: [], 8: []}
    for name, module in model.named_modules():
        bits = quantized(module._parameters.get("weight"))
        if bits:
            by_bits[bits].append(name)
    if not (by_bits[4] and by_bits[8]):
        return []
    return [
        f"{len(by_bits[4])} layers are in 4 bit ({list_names(by_bits[4])}) and {len(by_bits[8])} in 8 bit "
        f"({list_names(by_bits[8])}): accelerate and trainers ask the model for one of the two, and treat all layers "
        "alike. Next: load the whole model by one BitsAndBytesConfig"
    ]


def _offloaded(model: nn.Module, home: torch.device) -> list[str]:
    """Find layers whose weights are kept on the CPU or on disk and brought in for each forward pass."""
    if home.type == "cpu":
        return []
    places = getattr(model, "hf_device_map", None) or {}
    names = [name for name, place in places.items() if str(place) in ("cpu", "disk")] or [
        name
        for name, module in model.named_modules()
        if any(getattr(hook, "offload", False) for hook in accelerate_hooks(module))
    ]
    if not names:
        return []
    return [
        f"{len(names)} modules are offloaded to the CPU or to disk ({list_names(names)}): their weights come and go in "
        "the forward pass, and training cannot change or differentiate through them. Next: a device map without 'cpu' "
        "and 'disk', more bits saved (4 instead of 8), or a smaller model"
    ]


def find_native_problem(device: torch.device) -> str:
    """Return what is wrong with the native library of bitsandbytes for this device; "" if nothing is.

    bitsandbytes imports without its library, and fails in the first layer that needs it. Releases up to 0.45 set
    `lib = None`, so that this layer ends in "'NoneType' object has no attribute ..."; later ones put a stand-in there
    whose every function raises. On a CPU today's release falls back on plain torch, slowly.

    bitsandbytes is imported for this, quietly: its own report is a traceback and a page of advice. Source:
    bitsandbytes `cextension.py`.
    """
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        return (
            "the model has layers of bitsandbytes, which is not installed here. Next: pip install bitsandbytes, or "
            "load the model without quantization"
        )
    try:
        library, reason = _load_library()
    except Exception as error:  # an import of a broken build may end in anything
        return (
            f"bitsandbytes {version} does not import ({type(error).__name__}: {first_line(error)}), and 4- and 8-bit "
            "layers need it. Next: python -m bitsandbytes"
        )
    stand_in = type(library).__name__.startswith("ErrorHandler")
    if (library is not None and not stand_in) or (stand_in and device.type == "cpu"):
        return ""  # on a CPU, plain torch does its work
    return (
        f"bitsandbytes {version} runs without its native library ({reason or 'it names no reason'}): every 4- or 8-bit "
        "layer fails in its first forward pass. Next: python -m bitsandbytes shows what it looked for; install the "
        "release that fits this machine's CUDA and C++ runtime"
    )


def _load_library() -> tuple[object, str]:
    """Import the extension of bitsandbytes; return its library and the first line that it logged, or its error."""
    logger, log = logging.getLogger("bitsandbytes.cextension"), io.StringIO()
    with (
        mock.patch.object(logger, "handlers", [logging.StreamHandler(log)]),
        mock.patch.object(logger, "propagate", False),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        from bitsandbytes import cextension
    reason = log.getvalue().strip()
    if cextension.lib is None and not reason:  # imported earlier: load it once more, for the reason
        try:
            cextension.get_native_library()
        except Exception as error:
            reason = first_line(error)
    reason = reason or str(getattr(cextension.lib, "error_msg", ""))
    return cextension.lib, reason.splitlines()[0].removesuffix(".")[:300] if reason else ""
