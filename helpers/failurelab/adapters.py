"""A model made ready for adapters, in the order that works: merge, prepare for k-bit, hook, checkpoint, wrap.

What goes wrong in another order: PEFT hooks the input embeddings only if checkpointing was on *before* the wrap, and a
trainer switches it on *after*; transformers before 5 hooks them only for its own integration with PEFT, not for a PEFT
wrapper. So LoRA with reentrant checkpointing ends in "element 0 of tensors does not require grad", or trains only what
is trainable outside the checkpointed layers. An adapter put on top of another one of the same name replaces it and
begins at zero, so that what the first had learned is lost.

Sources: TRL #3150, #3089; peft `get_peft_model`, `prepare_model_for_kbit_training`.
"""

import copy
import warnings
from typing import Any

from torch import nn

from failurelab._checkpointing import enable_checkpointing
from failurelab._inputs import require_input_grads


class AdapterError(ValueError):
    """A model cannot be given this adapter; the message says why, and the model is as it was."""


def prepare_peft(
    model: nn.Module, peft_config: Any, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> nn.Module:
    """Return the model wrapped for training an adapter, whatever it was before, with every gradient in place.

    The order: existing adapters are merged and unloaded, so that the function stays the same (adapters that are
    switched off are dropped); a 4- or 8-bit model is prepared for training; checkpointing is switched on if asked for;
    the input embeddings are hooked (`require_input_grads`); the new adapter is put on. A trainer may switch
    checkpointing on later, reentrant or not: the hook is there.

    The model is changed in place; hand the result over to the trainer, without a `peft_config`.

    Args:
        model: a transformers model, plain or 4-bit, or a PeftModel.
        peft_config: of the new adapter; it is copied.
        gradient_checkpointing_kwargs: such as `{"use_reentrant": False}`, or `{}`; None leaves checkpointing as it is.

    Raises:
        AdapterError: a model wrapped twice, one whose training has begun, 4-bit weights that an evaluation has packed;
            the model is as it was. What PEFT refuses it says itself, after adapters were merged.
        GradientError: the model has no input embeddings.
    """
    import peft

    if not isinstance(peft_config, peft.PeftConfig):
        raise AdapterError(
            f"peft_config is a {type(peft_config).__name__}, not a PEFT config. Next: hand over one, such as "
            "peft.LoraConfig(task_type='CAUSAL_LM')."
        )
    _check_not_training(model)
    _check_wrapped_once(model)
    _check_not_packed(model)
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    if isinstance(model, peft.PeftModel):
        base = _merge(model)
    if is_quantized(base):
        _never_pack(base)
        # it freezes the weights and keeps norms and head in float32; checkpointing and the hook are made below, once
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    if gradient_checkpointing_kwargs is not None:
        enable_checkpointing(base, gradient_checkpointing_kwargs)
    require_input_grads(base)
    adapted: nn.Module = peft.get_peft_model(base, copy.deepcopy(peft_config))  # PEFT writes into what it is given
    return adapted


def is_quantized(model: nn.Module) -> bool:
    """Whether the model was loaded in 4 or 8 bit."""
    return bool(getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False))


def _check_not_packed(model: nn.Module) -> None:
    """Refuse 4-bit weights that an evaluation has packed for inference, as bitsandbytes does on some processors.

    The product with packed weights has no gradient, so that training ends in an error about an in-place operation or,
    where layers have no bias, in gradients of zero. Unpacking cannot bring the scales back (bitsandbytes 0.50,
    `_convert_weight_packed_for_cpu`: they are rounded to bfloat16).
    """
    for name, module in model.named_modules():
        if getattr(getattr(getattr(module, "weight", None), "quant_state", None), "packing_format_for_cpu", False):
            raise AdapterError(
                f"the 4-bit weights of {name} are packed for inference, which a forward pass in eval mode does on this "
                "processor, and no gradient passes them. Next: load the model anew, and prepare it before it is "
                "evaluated; afterwards it may be."
            )


def _never_pack(model: Any) -> None:
    """Keep bitsandbytes from packing 4-bit weights for inference when the model is evaluated between two steps."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _check_not_training(model: nn.Module) -> None:
    """Refuse a model that an optimizer may hold: it would go on with parameters that are no longer in the model."""
    name = next((name for name, parameter in model.named_parameters() if parameter.grad is not None), None)
    if name is None and not any(getattr(module, "_is_accelerate_prepared", False) for module in model.modules()):
        return
    sign = f"{name} has a gradient" if name else "a trainer has prepared it"
    raise AdapterError(
        f"training of this model has begun ({sign}): its optimizer holds parameters that a new adapter replaces, and "
        "would train nothing. Next: prepare the model before the trainer is made; to train on, save the model and load "
        "it again."
    )


def _check_wrapped_once(model: nn.Module) -> None:
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrapper = isinstance(model, peft.PeftModel)
    for name, module in model.named_modules():
        if name and isinstance(module, peft.PeftModel):
            raise AdapterError(
                f"this model is wrapped twice: inside is a {type(module).__name__} at {name}. Merging would leave the "
                "inner adapter in place. Next: load the base model anew, and merge one adapter before the next is put "
                "on."
            )
        if not isinstance(module, BaseTunerLayer):
            continue
        if not wrapper:
            raise AdapterError(
                f"{type(model).__name__} carries adapter layers and no PEFT wrapper that could merge them, such as at "
                f"{name} (model.add_adapter, or a wrapper that was thrown away). Next: hand over the PeftModel, or "
                "load the base model anew."
            )
        if isinstance(module.get_base_layer(), BaseTunerLayer):
            raise AdapterError(
                f"this model is wrapped twice: the adapter layer {name} has another one as its base. Next: load the "
                "base model anew, and merge one adapter before the next is put on."
            )


def _merge(model: Any) -> Any:
    """Return the base model with what its active adapters add, and no adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not hasattr(model.base_model, "merge_and_unload"):
        kind = next(iter(model.peft_config.values())).peft_type
        raise AdapterError(
            f"the adapter that is there cannot be merged: {getattr(kind, 'value', kind)} adds no difference to the "
            "weights. Next: start from the base model."
        )
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if layers and all(layer.disable_adapters for layer in layers):
        return model.unload()  # switched off, they are no part of the function
    if is_quantized(model.get_base_model()):
        warnings.warn(
            "the adapter is merged into 4- or 8-bit weights, which rounds them anew: the model's outputs change. To "
            "avoid that, merge into the base model in 16 or 32 bit, save it, and quantize that.",
            UserWarning,
            stacklevel=3,
        )
    return model.merge_and_unload()
