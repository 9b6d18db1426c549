"""The dtypes that meet in a 4-bit model: what its layers compute in, its adapters, and what autocast asks for.

What goes wrong: `bnb_4bit_compute_dtype` is float32 by default, a trainer's `bf16=True` is autocast, and PEFT makes
adapters in float32. None of these knows of the others. Mostly that costs time and memory (every layer casts its input
and output); float16 adapters under float16 autocast end in "Attempting to unscale FP16 gradients".

Sources: bitsandbytes `Linear4bit.set_compute_type`; transformers `BitsAndBytesConfig`; torch `GradScaler.unscale_`.
"""

import collections
from typing import Any

import torch
from torch import nn

from failurelab._text import dtype_name

_UNSETTLED = "first input's"


def find_mixed_precision(model: nn.Module, adapter_names: set[str], autocast: torch.dtype | None) -> list[str]:
    """Return which dtypes of a model do not fit together, a sentence each.

    Args:
        model: any.
        adapter_names: names of the parameters that are an adapter's.
        autocast: what autocast will cast to in training; None where it is off.
    """
    adapters = {dtype_name(parameter.dtype) for name, parameter in model.named_parameters() if name in adapter_names}
    layers: dict[str, str] = {}
    for name, module in model.named_modules():
        if quantized(getattr(module, "weight", None)) == 4 and not hasattr(module, "base_layer"):
            dtype = getattr(module, "compute_dtype", None)
            # bitsandbytes < 0.46 replaces even a given dtype by that of the first input
            layers[name] = _UNSETTLED if dtype is None else dtype_name(dtype)
    compute = collections.Counter(layers.values())
    cast = "" if autocast is None else dtype_name(autocast)
    problems = []
    if len(compute) > 1:
        first = {dtype: name for name, dtype in reversed(layers.items())}
        dtypes = ", ".join(f"{dtype} in {compute[dtype]} (such as {name})" for dtype, name in sorted(first.items()))
        problems.append(f"4-bit layers compute in different dtypes: {dtypes}. Next: load all by one BitsAndBytesConfig")
    if len(adapters) > 1:
        problems.append(f"adapter weights have different dtypes: {', '.join(sorted(adapters))}. Next: make them one")
    for dtype in sorted(set(compute) - {_UNSETTLED, cast}):
        if cast:
            problems.append(
                f"autocast is {cast}, and {compute[dtype]} 4-bit layers compute in {dtype}: each casts its input and "
                f"output. Next: bnb_4bit_compute_dtype=torch.{cast} in the BitsAndBytesConfig"
            )
    if cast == "float16" and "float16" in adapters:
        problems.append(
            "adapters are float16 under float16 autocast, whose gradient scaler refuses float16 gradients. Next: "
            "adapters in float32"
        )
    return problems


def quantized(weight: Any) -> int:
    """Return the bits of a quantized weight of bitsandbytes, 4 or 8, else 0; bitsandbytes is not imported."""
    classes = {kind.__name__ for kind in type(weight).__mro__}
    if "Params4bit" in classes or getattr(weight, "quant_state", None) is not None:
        return 4  # a fake tensor has a class of its own
    return 8 if "Int8Params" in classes else 0
