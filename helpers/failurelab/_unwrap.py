"""The transformers model under its wrappers, and what is asked of it: its input device and its vocabulary."""

from typing import Any

import torch
from torch import nn


def unwrap(model: nn.Module) -> Any:
    """Return the transformers model under its wrappers: DDP, an engine, torch.compile, PEFT."""
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        else:
            return inner


def has_adapter(model: nn.Module) -> bool:
    """Whether a model has an adapter now: some releases of PEFT leave `peft_config` on one that was merged."""
    return hasattr(model, "disable_adapter") or any("lora_" in name for name, _ in model.named_parameters())


def vocabulary_size(model: nn.Module) -> int:
    """Return how many token ids the model knows."""
    embedding = unwrap(model).get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])


def input_device(model: nn.Module) -> torch.device:
    """Return the device on which the model takes its input."""
    device: torch.device = unwrap(model).get_input_embeddings().weight.device
    return device
