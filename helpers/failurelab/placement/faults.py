"""Faults of placement that are no single tensor's: what `placement.check` looks for besides devices.

What goes wrong: a 4-bit weight without its scales is noise; a tied output layer that has become a tensor of its own is
trained apart from the embeddings; layers in 8 and in 4 bit are treated alike by whoever asks the model for one of the
two; offloaded weights cannot be trained.
"""

from typing import Any

import torch
from torch import nn

from failurelab.placement import dtypes as precision

_NAMED = 3  # so many names are spelled out in a report's text


def find(model: nn.Module, home: torch.device) -> list[str]:
    """Return every fault of a model that is to be trained on `home`, a sentence each that names modules and devices."""
    return _lost_states(model) + _torn_head(model) + _two_quantizations(model) + _offloaded(model, home)


def some(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def hooks(module: nn.Module) -> list[Any]:
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
    return [f"{len(lost)} 4-bit weights have lost their quantization state ({some(lost)}). Next: load the model anew"]


def _torn_head(model: nn.Module) -> list[str]:
    """Find an output layer that should share the embeddings' tensor and has one of its own."""
    config = getattr(model, "config", None)
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if head is None or not getattr(config, "tie_word_embeddings", False):
        return []
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        return []
    ours, theirs = getattr(head, "weight", None), getattr(embeddings, "weight", None)
    if ours is None or theirs is None or ours is theirs:
        return []
    names = {id(module): name for name, module in model.named_modules()}
    return [
        f"the output layer {names.get(id(head), 'lm_head')} ({ours.device}) is tied to the embeddings "
        f"{names.get(id(embeddings), 'embed_tokens')} ({theirs.device}) by the config, and is a tensor of its own: the "
        "two would be trained apart. Next: map both to one device, then model.tie_weights()"
    ]


def _two_quantizations(model: nn.Module) -> list[str]:
    by_bits: dict[int, list[str]] = {4: [], 8: []}
    for name, module in model.named_modules():
        bits = precision.quantized(module._parameters.get("weight"))
        if bits:
            by_bits[bits].append(name)
    if not (by_bits[4] and by_bits[8]):
        return []
    return [
        f"{len(by_bits[4])} layers are in 4 bit ({some(by_bits[4])}) and {len(by_bits[8])} in 8 bit "
        f"({some(by_bits[8])}): accelerate and trainers ask the model for one of the two, and treat all layers alike. "
        "Next: load the whole model by one BitsAndBytesConfig"
    ]


def _offloaded(model: nn.Module, home: torch.device) -> list[str]:
    """Find layers whose weights are kept on the CPU or on disk and brought in for each forward pass."""
    if home.type == "cpu":
        return []
    places = getattr(model, "hf_device_map", None) or {}
    named = [name or "the whole model" for name, place in places.items() if str(place) in ("cpu", "disk")]
    hooked = [
        name for name, module in model.named_modules() if any(getattr(h, "offload", False) for h in hooks(module))
    ]
    found = named or hooked
    if not found:
        return []
    return [
        f"{len(found)} modules are offloaded to the CPU or to disk ({some(found)}): their weights come and go in the "
        "forward pass, and training cannot change or differentiate through them. Next: a device map without 'cpu' and "
        "'disk', more bits saved (4 instead of 8), or a smaller model"
    ]
