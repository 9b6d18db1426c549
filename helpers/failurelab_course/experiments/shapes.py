"""The shape of a model without its weights: for questions of memory and placement, which no number answers.

`tiny` is too small to hurt anybody. So a cell that measures memory takes the shape that it is given: the small one that
the course's pages show, Qwen2-0.5B's for `random-0.5b`, or that of a folder or hub model; and random weights.
"""

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from failurelab_course.experiments import devices as tiers
from failurelab_course.experiments import hub, models, task


def config(name: str, layers: int | None = None) -> Any:
    """Return the config of a model that `models.load` knows; its weights are not read.

    Args:
        name: `tiny`, `random-0.5b`, a folder, or a hub name.
        layers: so many instead of its own; there may be more.

    Raises:
        ModelError: the model is unknown, or its config cannot be read.
        ValueError: `layers` is below 1.
    """
    found = transformers.Qwen2Config(**models.HALF_BILLION) if name == "random-0.5b" else _read(name)
    if layers is None:
        return found
    if layers < 1:
        raise ValueError(f"a model of {layers} layers computes nothing; give 1 or more")
    changed = found.to_dict() | {"num_hidden_layers": layers}
    changed.pop("layer_types", None)  # one entry a layer, in transformers 5: made anew
    return type(found).from_dict(changed)


def _read(name: str) -> Any:
    try:
        source = hub.located(name) if hub.is_name(name) else str(models.path(name))
        return AutoConfig.from_pretrained(source)
    except models.ModelError:
        raise
    except Exception as error:  # of the hub, of json, of config classes: they share no narrower class
        raise models.ModelError(hub.why(name, name, error)) from error


def build(shape: Any, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return a causal language model of this shape with random weights, made where it is used; in train mode.

    The caller's random state stays as it was.

    Args:
        shape: a transformers config.
        device: where the weights are made.
        dtype: of the weights.
        seed: of the weights.

    Raises:
        TierError: the GPU has not the memory for the weights and their gradients.
    """
    tiers.require_memory(2 * parameters(shape) * dtype.itemsize / tiers.GIB, device, "the model with its gradients")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with task.random_state(seed), torch.device(device):
            return AutoModelForCausalLM.from_config(shape, **{models.dtype_key(): dtype}).train()
    finally:
        torch.set_default_dtype(before)


def parameters(shape: Any) -> int:
    """Return how many parameters a model of this shape has; tied weights count once."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape)
    model.tie_weights()
    return sum(each.numel() for each in model.parameters())


def told(name: str) -> str:
    """Return a model's shape in words for a table or a title, such as `24 layers, width 896, vocabulary 151,936`."""
    shape = config(name)
    return f"{shape.num_hidden_layers} layers, width {shape.hidden_size}, vocabulary {shape.vocab_size:,}"
