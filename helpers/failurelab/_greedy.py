"""Greedy decoding that can be compared: the same prompts, token by token, in two states of a model.

Which settings reach `generate` differs between transformers versions, and trainers sample, with dropout on. To compare
two states of a model everything else must be equal: this module makes it so, for `rollouts`.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NEW_TOKENS = 32  # generated where nothing says how many
Prompt = str | list[dict[str, str]]
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
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
    for index, prompt in enumerate(prompts):
        text = (
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        )
        rows.append(tokenizer(text)["input_ids"])
        _check_fit(model, index, text, len(rows[-1]), new_tokens)
    longest = max(map(len, rows))
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    device = next(model.parameters()).device
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _check_fit(model: nn.Module, index: int, text: str, length: int, new_tokens: int) -> None:
    config = base_model(model).config
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
    """Yield arguments for `generate` that decode greedily, whichever config this transformers lets win.

    Before 4.50 the config handed over wins; later ones fill what it leaves at its default from the model's own. So both
    are made greedy, each otherwise as it is: what they say of the cache may be what is in question.
    """
    owner = base_model(model)
    own = owner.generation_config
    kwargs = {name: value for name, value in generate_kwargs.items() if name not in _DROPPED}
    given = kwargs.pop("generation_config", None) or own
    new_tokens = kwargs.pop("max_new_tokens", None) or given.max_new_tokens or NEW_TOKENS
    kwargs["generation_config"] = _made_greedy(given, new_tokens)
    owner.generation_config = _made_greedy(own, new_tokens)
    try:
        yield kwargs
    finally:
        owner.generation_config = own


def _made_greedy(config: Any, new_tokens: int) -> Any:
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


class NoDropout(TorchFunctionMode):
    """Dropout does nothing inside, without touching any module's mode; `stopped` says that it would have."""

    stopped = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)) | kwargs
            self.stopped |= bool(given.get("dropout_p"))
            return func(**(given | {"dropout_p": 0.0}))
        if "dropout" in name:
            given = dict(zip(("input", "p", "training"), args)) | kwargs
            self.stopped |= bool(given.get("p", 0.5) and given.get("training", given.get("train", True)))
            return given["input"]
        return func(*args, **kwargs)


@contextlib.contextmanager
def use_cache_told(model: nn.Module) -> Iterator[list[bool | None]]:
    """Note what `use_cache` the model's forward pass is called with."""
    told: list[bool | None] = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        told.append(kwargs.get("use_cache"))

    hook = base_model(model).register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield told
    finally:
        hook.remove()


def base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside PEFT's wrapper: its generation config is the one that `generate` asks."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def completions(
    output: Any, prompt_length: int, kwargs: dict[str, Any], tokenizer: Any
) -> list[tuple[list[int], torch.Tensor]]:
    """Return of each row the tokens after the prompt, up to the first end token, and what they were chosen with.

    The latter are the log-probabilities `(tokens,)` that generation itself gave them, before any processing.
    """
    ends = kwargs["generation_config"].eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    ends = set(ends) if isinstance(ends, list | tuple) else {ends}
    new = output.sequences[:, prompt_length:]
    steps = zip(output.logits, new.unbind(1))
    logps = torch.stack([each.float().log_softmax(-1).gather(-1, token[:, None])[:, 0] for each, token in steps], 1)
    made = []
    for tokens, row in zip(new.tolist(), logps):
        length = next((at for at, token in enumerate(tokens) if token in ends), len(tokens) - 1) + 1
        made.append((tokens[:length], row[:length]))
    return made
