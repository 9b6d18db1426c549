"""Problems of placement beyond single tensors: what `placement.check` looks for besides devices.

What goes wrong: a 4-bit weight without its scales is noise; a tied output layer that has become a tensor of its own is
trained apart from the embeddings; and offloaded weights cannot be trained.
"""

from typing import Any

import torch
from torch import nn

from failurelab._text import list_names


def find_problems(model: nn.Module, home: torch.device) -> list[str]:
    """Return every problem of a model to be trained on `home`, a sentence each that names modules and devices."""
    return _lost_states(model) + _torn_head(model) + _offloaded(model, home)


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


def quantized(weight: Any) -> int:
    """Return the bits of a quantized weight of bitsandbytes, 4 or 8, else 0; bitsandbytes is not imported."""
    classes = {kind.__name__ for kind in type(weight).__mro__}
    if "Params4bit" in classes or getattr(weight, "quant_state", None) is not None:
        return 4  # a fake tensor has a class of its own
    return 8 if "Int8Params" in classes else 0
