"""Layers of bitsandbytes in 4 bit without numbers: shapes of QLoRA models, and bitsandbytes' own code on them.

Quantizing needs numbers, and a GPU in older releases. Placement and memory need only shapes: two weights to a byte, and
one float32 scale for each 64. The layers are bitsandbytes' own `Linear4bit`, so their forward and backward passes and
their errors are real. Simulated devices need a release from 0.46 on, which declares the shapes of its kernels to torch;
older ones check devices, and then call their native library.

Source: bitsandbytes `QuantState`, `functional.quantize_4bit`.
"""

import logging
from typing import Any

import torch
from torch import nn

_BLOCK = 64


def four_bit(model: nn.Module, *, compute_dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Replace linear layers, but the head, by `Linear4bit` without numbers, as loading in 4 bit does; return the model.

    Args:
        model: on meta tensors, from `simulate.model`; give it to `simulate.place` afterwards. A single linear layer
            is replaced by what is returned.
        compute_dtype: `bnb_4bit_compute_dtype`.
    """
    if isinstance(model, nn.Linear):
        layer: nn.Module = _layer(model, compute_dtype)
        return layer
    for module in list(model.modules()):
        for part, child in list(module.named_children()):
            if type(child) is nn.Linear and part != "lm_head":
                setattr(module, part, _layer(child, compute_dtype))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    told: Any = model
    told.is_loaded_in_4bit = True
    return model


def _layer(linear: nn.Linear, compute_dtype: torch.dtype) -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # no native library is needed, and it says it is
    import bitsandbytes

    shape = linear.weight.shape
    count = shape.numel()
    with torch.device("meta"):
        layer = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=compute_dtype
        )
        if linear.bias is not None:
            layer.bias = nn.Parameter(torch.empty_like(linear.bias, device="meta"), requires_grad=False)
        state = bitsandbytes.functional.QuantState(
            absmax=torch.empty(-(-count // _BLOCK), dtype=torch.float32),
            shape=torch.Size(shape),
            code=torch.empty(16, dtype=torch.float32),
            blocksize=_BLOCK,
            quant_type="nf4",
            dtype=compute_dtype,
        )
        packed = torch.empty(-(-count // 2), 1, dtype=torch.uint8)
    layer.weight = bitsandbytes.nn.Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True)
    layer.quant_state = state
    return layer
