"""Checkpointing by the name that the release at hand has for it.

transformers 5.23 calls it `activation_checkpointing`. The older `gradient_checkpointing` warns there, and goes in v6.
The flag on a model's modules, and what trl and PEFT call it, still have the older name.
"""

from typing import Any


def enable_checkpointing(model: Any, kwargs: dict[str, Any] | None = None) -> None:
    """Switch checkpointing on for a transformers model, wrapped or not; `kwargs` such as `{"use_reentrant": False}`."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def option_name() -> str:
    """Return what the training arguments of this transformers call the option; its keywords' end in `_kwargs`."""
    from transformers import TrainingArguments

    new = "activation_checkpointing"
    return new if new in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing"
