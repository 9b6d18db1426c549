"""Greedy decoding that can be compared: the same prompts, token by token, in two states of a model.

Which settings reach `generate` differs between transformers versions, and trainers sample, with dropout on. To compare
two states of a model, everything else must be equal. This module makes it equal, for `rollouts`.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from failurelab._row_inputs import split_inputs
from failurelab._unwrap import unwrap

NEW_TOKENS = 32  # generated where nothing says how many
Prompt = str | list[dict[str, str]]
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_POSITIONS = ("position_ids", "cache_position")  # of the padded prompt, without which the model counts by itself
_DROPPED = ("do_sample", "num_beams", "num_return_sequences", "streamer", *_SAMPLING)


def encode(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input ids and attention mask, both `(prompts, longest)`, padded on the left, on the model's device.

    Raises:
        ValueError: no prompts, an empty one, or one that does not fit the model's context with `new_tokens` more.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts:
        raise ValueError(
            "no prompts: there is nothing to generate from. Next: hand over a few of the training prompts."
        )
    rows = []
    processor, tokenizer = tokenizer, getattr(tokenizer, "tokenizer", tokenizer)  # a processor takes images first
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            prompt = processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        rows.append(tokenizer(prompt)["input_ids"])
        _check_fit(model, index, prompt, len(rows[-1]), new_tokens)
    longest = max(map(len, rows))
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    device = next(model.parameters()).device
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask  # both (prompts, longest)


def _check_fit(model: nn.Module, index: int, text: str, length: int, new_tokens: int) -> None:
    config = unwrap(model).config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    context = getattr(config, "max_position_embeddings", None)
    if not length:
        raise ValueError(f"prompt {index} ({text!r}) has no tokens: generation needs one. Next: leave it out.")
    if context and length + new_tokens > context:
        raise ValueError(
            f"prompt {index} does not fit: {length} tokens and {new_tokens} new ones are more than the model's context "
            f"of {context}. Positions past it were never trained, so any disagreement there would mean nothing. "
            f"Next: shorten it, or ask for fewer tokens (max_new_tokens={max(context - length, 1)})."
        )


@contextlib.contextmanager
def greedy(model: nn.Module, generate_kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield arguments for `generate` that decode greedily, whichever generation config this transformers prefers.

    Before 4.50 the config handed over wins; later ones fill what it leaves at its default from the model's own. So both
    become greedy, and stay as they are otherwise: the cache that they ask for may be what is in question.
    """
    owner = unwrap(model)
    kwargs = {name: value for name, value in generate_kwargs.items() if name not in _DROPPED}
    config = kwargs.pop("generation_config", None) or owner.generation_config
    new_tokens = kwargs.pop("max_new_tokens", None) or config.max_new_tokens or NEW_TOKENS
    kwargs["generation_config"] = _greedy_copy(config, new_tokens)
    with mock.patch.object(owner, "generation_config", _greedy_copy(owner.generation_config, new_tokens)):
        yield kwargs


def _greedy_copy(config: Any, new_tokens: int) -> Any:
    config = copy.deepcopy(config)
    config._from_model_config = False  # else 4.x may replace it by one made from model.config
    config.do_sample, config.num_beams, config.num_return_sequences = False, 1, 1
    for name in _SAMPLING:
        if hasattr(config, name):
            setattr(config, name, None)  # as greedy decoding wants it; transformers warns of another value
    config.return_dict_in_generate = config.output_logits = True
    config.max_new_tokens = new_tokens
    if config.min_new_tokens:
        config.min_new_tokens = min(config.min_new_tokens, new_tokens)
    return config


def tensors(generate_kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the inputs of the model among arguments for `generate`, such as images."""
    return {
        name: value
        for name, value in generate_kwargs.items()
        if isinstance(value, torch.Tensor) and name not in _POSITIONS
    }


def inputs_of_row(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], input_ids: torch.Tensor, mask: torch.Tensor, row: int
) -> dict[str, torch.Tensor]:
    """Return what belongs to one row of a batch, without its padding: images, their sizes, and types of tokens.

    Args:
        model: whose config may name the token that stands for an image.
        inputs: of the batch, beside the ids.
        input_ids: `(batch, length)`.
        mask: `(batch, length)`, 0 for padding.
        row: of the batch.

    Raises:
        ValueError: it cannot be told which images are this row's, because rows have different numbers of them.
    """
    config = unwrap(model).config
    image = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    rows = split_inputs(inputs, input_ids, mask.bool(), image)
    if rows is None:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
        raise ValueError(
            f"which images belong to which of {len(input_ids)} prompts is not known ({shapes}), so their tokens cannot "
            "be scored one by one. Next: a batch with one image for each prompt, or RolloutGuard(prompts=...) with "
            "prompts that need none."
        )
    of_tokens = {name for name, value in inputs.items() if value.shape == input_ids.shape}
    return {name: value[None] if name in of_tokens else value for name, value in rows[row].items()}


class NoDropout(TorchFunctionMode):
    """Dropout does nothing inside, although no module's mode is changed; `stopped` says that it would have."""

    stopped = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            call = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)) | kwargs
            self.stopped |= bool(call.get("dropout_p"))
            return func(**(call | {"dropout_p": 0.0}))
        if "dropout" in name:
            call = dict(zip(("input", "p", "training"), args)) | kwargs
            self.stopped |= bool(call.get("p", 0.5) and call.get("training", call.get("train", True)))
            return call["input"]
        return func(*args, **kwargs)


@contextlib.contextmanager
def record_use_cache(model: nn.Module) -> Iterator[list[bool | None]]:
    """Yield a list that gets the `use_cache` of each call of the model's forward pass."""
    values: list[bool | None] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values.append(kwargs.get("use_cache"))

    with unwrap(model).register_forward_pre_hook(record, with_kwargs=True):
        yield values


def read_completions(
    output: Any, prompt_length: int, config: Any, tokenizer: Any
) -> list[tuple[list[int], torch.Tensor]]:
    """Return for each row its completion, up to the first end token, and the log-probabilities it was chosen with.

    The latter, `(tokens,)`, are those of generation itself, before any processing of the logits.

    Raises:
        ValueError: what generated gave no logits, although it was asked for them.
    """
    sequences, logits = (getattr(output, name, None) for name in ("sequences", "logits"))
    if not isinstance(sequences, torch.Tensor) or not isinstance(logits, tuple) or not logits:
        raise ValueError(
            f"generation gave a {type(output).__name__} without the logits that it was asked for "
            "(return_dict_in_generate and output_logits), so what it drew cannot be compared with the policy. "
            "Something stands in the place of the model's own generate: a mock, or a function of the script. "
            "Next: let it hand its arguments on to model.generate, or leave this check out."
        )
    end = tokenizer.eos_token_id if config.eos_token_id is None else config.eos_token_id
    ends = set(end) if isinstance(end, list | tuple) else {end}
    tokens = sequences[:, prompt_length:]  # (batch, new)
    steps = [  # of logits that are (batch, vocabulary), for each new token
        of_token.detach().float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
        for of_token, chosen in zip(logits, tokens.unbind(1))
    ]
    completions = []
    for row, log_probs in zip(tokens.tolist(), torch.stack(steps, 1)):
        length = next((place for place, token in enumerate(row) if token in ends), len(row) - 1) + 1
        completions.append((row[:length], log_probs[:length]))
    return completions
