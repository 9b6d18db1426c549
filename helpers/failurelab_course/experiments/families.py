"""Other families of models beside the small Qwen2, to see whether a failure belongs to Qwen2 at all.

"It is an incompatibility with Qwen2" is said of nearly every failure in this course, since the reports name Qwen2.
Whether it is one shows when the same weights run as another family. Qwen2 is Llama with biases on query, key and value,
so its weights fit Llama's class exactly, and compute the same function there. For questions that weights do not matter
to there are small models of many families, with random numbers.

Upstream: https://github.com/huggingface/trl/issues/3150 (Qwen2-0.5B-Instruct is named in the title).
"""

from typing import Any

import transformers

from failurelab_course.experiments import task

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
