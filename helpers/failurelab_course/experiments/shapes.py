"""Models with random weights: of the shape of a named model, and of other families beside the small Qwen2.

Memory and placement depend on a model's shape alone, and `tiny` is too small to fill a card. So a cell that measures
memory takes the shape that it is given: the small one that the course's pages show, Qwen2-0.5B's for `random-0.5b`, or
that of a folder or hub model.

"It is an incompatibility with Qwen2" is said of nearly every failure in this course, since the reports name Qwen2.
Whether it is one shows when the same weights run as another family. Qwen2 is Llama with biases on query, key and value,
so its weights fit Llama's class exactly, and compute the same function there.

Upstream: https://github.com/huggingface/trl/issues/3150 (Qwen2-0.5B-Instruct is named in the title).
"""

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from failurelab_course.experiments import devices, models, task

_SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_GATED = {**_SHAPE, "intermediate_size": 64, "num_key_value_heads": 2}
# The name of the config's class without "Config", and what is asked of it.
SMALL: dict[str, dict[str, Any]] = {
    "Qwen2": _GATED,
    "Llama": _GATED,
    "Mistral": _GATED,
    "Gemma": {**_GATED, "head_dim": 8},
    "Gemma2": {**_GATED, "head_dim": 8},
    "Phi": {**_SHAPE, "intermediate_size": 64},
    "Phi3": {**_GATED, "pad_token_id": 0},
    "Mixtral": {**_GATED, "num_local_experts": 4},
    "Qwen2Moe": {**_GATED, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "GPT2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "GPTNeoX": {**_SHAPE, "intermediate_size": 64},
    "OPT": {**_SHAPE, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": _SHAPE,
    "StableLm": _GATED,
    "Cohere": _GATED,
    "Olmo": _GATED,
    "Starcoder2": _GATED,
    "Mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
_KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def config(name: str, layers: int | None = None) -> Any:
    """Return the config of a model that `models.load` knows; its weights are not read.

    Args:
        name: `tiny`, `random-0.5b`, a folder, or a hub name.
        layers: so many instead of its own; there may be more.

    Raises:
        ModelError: the model is unknown, or its config cannot be read.
        ValueError: `layers` is below 1.
    """
    if name == "random-0.5b":
        shape = transformers.Qwen2Config(**models.HALF_BILLION)
    else:
        folder = models.located(name)
        try:
            shape = AutoConfig.from_pretrained(folder)
        except Exception as error:  # of the hub, of json, of config classes: they share no narrower class
            raise models.loading_error(name, error) from error
    if layers is None:
        return shape
    if layers < 1:
        raise ValueError(f"a model of {layers} layers computes nothing; give 1 or more")
    values = shape.to_dict() | {"num_hidden_layers": layers}
    values.pop("layer_types", None)  # one entry a layer, in transformers 5: made anew
    return type(shape).from_dict(values)


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
    devices.require_memory(2 * parameters(shape) * dtype.itemsize / devices.GIB, device, "the model with its gradients")
    with task.random_weights(seed, dtype, device):
        return AutoModelForCausalLM.from_config(shape, **{models.dtype_key(): dtype}).train()


def parameters(shape: Any) -> int:
    """Return how many parameters a model of this shape has; tied weights count once."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def small(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """Return a causal language model of two layers of this family, with random weights, in train mode.

    Args:
        name: one of `SMALL`.
        seed: of the weights; the caller's random state is left as it was.

    Raises:
        ValueError: another name.
    """
    if name not in SMALL:
        raise ValueError(f"unknown family {name!r}: there are {', '.join(SMALL)}")
    config = getattr(transformers, f"{name}Config")(**SMALL[name])
    with task.random_state(seed):
        return transformers.AutoModelForCausalLM.from_config(config).train()


def as_llama(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Return a copy of a Qwen2 in transformers' Llama class: the same weights, the same function, other code.

    Raises:
        ValueError: `model` is no Qwen2ForCausalLM, or one with sliding-window attention, which Llama does not have.
    """
    if not isinstance(model, transformers.Qwen2ForCausalLM):
        raise ValueError(f"a Qwen2ForCausalLM is needed, this is a {type(model).__name__}")
    config = model.config
    if config.use_sliding_window:
        raise ValueError("this Qwen2 uses sliding-window attention, which Llama does not have")
    theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    values = {name: getattr(config, name) for name in _KEPT}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**values, rope_theta=theta, attention_bias=True)  # on all four; Qwen2 has three
    )
    for layer in llama.model.layers:
        layer.self_attn.o_proj.bias = None
    llama.load_state_dict(model.state_dict())
    llama.generation_config = model.generation_config
    return llama.to(device=model.device, dtype=model.dtype).train(model.training)
