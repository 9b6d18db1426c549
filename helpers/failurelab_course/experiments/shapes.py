"""The same weights in another family: a Qwen2 as a Llama.

"It is an incompatibility with Qwen2" is said of nearly every failure in this course, since the reports name Qwen2.
Whether it is one shows when the same weights run as another family. Qwen2 is Llama with biases on query, key and value,
so its weights fit Llama's class exactly, and compute the same function there.

Upstream: https://github.com/huggingface/trl/issues/3150 (Qwen2-0.5B-Instruct is named in the title).
"""

import transformers

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
