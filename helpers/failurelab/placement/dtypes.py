"""The dtypes that meet in a 4-bit model: what its layers compute in, its adapters, and what autocast asks for.

What goes wrong: `bnb_4bit_compute_dtype` is float32 by default, a trainer's `bf16=True` is autocast, and PEFT makes
adapters in float32. None of these knows of the others. Mostly that costs time and memory (every layer casts its input
and output); float16 adapters under float16 autocast end in "Attempting to unscale FP16 gradients".

Sources: bitsandbytes `Linear4bit.set_compute_type`; transformers `BitsAndBytesConfig`; torch `GradScaler.unscale_`.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_UNSETTLED = "first input's"


@dataclasses.dataclass(frozen=True)
class Precisions:
    """Which dtypes a model computes in; each mapping goes from a dtype's name to how many layers or tensors have it.

    Attributes:
        weights: floating-point tensors that are neither quantized nor an adapter's.
        compute: layers in 4 bit, by the dtype they compute in; `first input's` where that is not settled yet.
        adapters: tensors of adapters.
        autocast: what autocast casts to, or "" where it is off.
        mixed: what does not fit together, a sentence each.
    """

    weights: Mapping[str, int]
    compute: Mapping[str, int]
    adapters: Mapping[str, int]
    autocast: str
    mixed: tuple[str, ...]

    def __str__(self) -> str:
        groups = {
            "other weights": self.weights,
            "4-bit layers compute in": self.compute,
            "adapters": self.adapters,
        }
        parts = [
            f"{group} {', '.join(f'{dtype} ({count})' for dtype, count in counts.items())}"
            for group, counts in groups.items()
            if counts
        ]
        return "; ".join([*parts, f"autocast {self.autocast or 'off'}"])


def measure_precisions(model: nn.Module, adapter_names: set[str], autocast: torch.dtype | None) -> Precisions:
    """Return the dtypes of a model.

    Args:
        model: any.
        adapter_names: names of the parameters that are an adapter's.
        autocast: what autocast will cast to in training; None where it is off.
    """
    weights, compute, adapters = collections.Counter(), collections.Counter(), collections.Counter()
    for name, parameter in model.named_parameters():
        if name in adapter_names:
            adapters[_short(parameter.dtype)] += 1
        elif parameter.is_floating_point() and not quantized(parameter):
            weights[_short(parameter.dtype)] += 1
    layers: dict[str, str] = {}
    for name, module in model.named_modules():
        if quantized(getattr(module, "weight", None)) == 4 and not hasattr(module, "base_layer"):
            dtype = getattr(module, "compute_dtype", None)
            # bitsandbytes < 0.46 replaces even a given dtype by that of the first input
            layers[name] = _UNSETTLED if dtype is None else _short(dtype)
            compute[layers[name]] += 1
    cast = "" if autocast is None else _short(autocast)
    return Precisions(
        dict(weights), dict(compute), dict(adapters), cast, tuple(_mixed(layers, compute, adapters, cast))
    )


def quantized(weight: Any) -> int:
    """Return the bits of a quantized weight of bitsandbytes, 4 or 8, else 0; bitsandbytes is not imported."""
    classes = {kind.__name__ for kind in type(weight).__mro__}
    if "Params4bit" in classes or getattr(weight, "quant_state", None) is not None:
        return 4  # a fake tensor has a class of its own
    return 8 if "Int8Params" in classes else 0


def _mixed(layers: dict[str, str], compute: Mapping[str, int], adapters: Mapping[str, int], cast: str) -> list[str]:
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
