"""The course's task: sums of two numbers from 0 to 19, as prompts, rows of a dataset, a reward and an accuracy.

It is small enough for a model of 0.3 million parameters, and a reward of 1 or 0 is all that GRPO needs. A model of
another tokenizer, with a chat template, was never taught to go on after `3+4=`; it is asked in words, as its users do.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | list[dict[str, str]]
_ALPHABET = 1000  # a tokenizer of single bytes and some marks has fewer tokens


@contextlib.contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Seed torch for a block, on every device, and give the caller's random state back after it."""
    # Unasked, fork_rng would start CUDA on every GPU, for a run on the CPU too.
    started = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=started):
        torch.manual_seed(seed)
        yield


def sums() -> list[tuple[str, str]]:
    """Return the 400 sums as (prompt, answer), such as `("3+4=", "7")`."""
    return [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def as_chat(prompt: str) -> list[dict[str, str]]:
    """Return `prompt` as the one message of a user, for the chat template."""
    return [{"role": "user", "content": prompt}]


def in_words(prompt: str) -> list[dict[str, str]]:
    """Return a sum such as `3+4=` as a user would ask it of a model that was never taught this task."""
    return as_chat(f"What is {prompt.rstrip('=')}? Answer with the number only.")


_FORMS = {"plain": str, "chat": as_chat, "words": in_words}


def form_for(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the form of prompt that a model with this tokenizer is asked in: `plain` or `words`.

    The small model, and any whose tokenizer has an alphabet instead of a vocabulary, goes on after `3+4=`; so does a
    model without a chat template.
    """
    return "words" if tokenizer.chat_template and len(tokenizer) > _ALPHABET else "plain"


def rows(seed: int | None = None, form: str = "plain") -> Any:
    """Return the sums as a `datasets.Dataset` with the columns `prompt` and `answer`, 400 rows.

    Args:
        seed: shuffles the rows; None leaves them in order.
        form: `plain`, prompts are text; `chat`, the same text as a message; `words`, a question as a message.

    Raises:
        ValueError: another form.
    """
    import datasets

    if form not in _FORMS:
        raise ValueError(f"unknown form {form!r}: prompts are {', '.join(_FORMS)}")
    pairs = sums()
    if seed is not None:
        random.Random(seed).shuffle(pairs)
    prompts = [_FORMS[form](prompt) for prompt, _ in pairs]
    return datasets.Dataset.from_dict({"prompt": prompts, "answer": [answer for _, answer in pairs]})


def equal_length_rows(dataset: Any, length: int | None = None) -> Any:
    """Keep the rows whose prompt has `length` characters, by default the most frequent length; none needs padding.

    The small model's tokenizer makes one token of each character, so that these prompts have equally many tokens.

    Raises:
        ValueError: no row is that long.
    """
    lengths = [len(as_text(prompt)) for prompt in dataset["prompt"]]
    length = length or max(sorted(set(lengths)), key=lengths.count)
    kept = [index for index, characters in enumerate(lengths) if characters == length]
    if not kept:
        raise ValueError(f"no prompt has {length} characters: there are {sorted(set(lengths))}")
    return dataset.select(kept)


def reward(completions: Sequence[Prompt], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1.0 for each completion that is exactly the answer, else 0.0: a reward function for GRPOTrainer.

    Args:
        completions: text, or in chat form lists of messages, the last of which counts.
        answer: the dataset's column, one for each completion.
    """
    return [float(as_text(completion).strip() == right) for completion, right in zip(completions, answer, strict=True)]


def as_text(prompt: Prompt) -> str:
    """Return a text as it is, and of messages what the last one says."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampled: bool = False,
    seed: int = 0,
    prompts: Sequence[tuple[Prompt, str]] | None = None,
    train_mode: bool = False,
    **generate_kwargs: Any,
) -> float:
    """Return the share of sums whose generated completion is right, 0 to 1.

    Deterministic: sampling has a seed of its own, and the caller's random state, the model's mode and its generation
    config stay as they were. Whatever `generate` does wrong in train mode shows here with `train_mode=True`.

    Args:
        model: a causal language model; its device is used.
        tokenizer: pads on the left.
        sampled: draw at temperature 1 from the whole vocabulary, as GRPO does; else greedy.
        seed: of the sampling.
        prompts: pairs of prompt (text, or messages for the chat template) and answer; by default all 400 sums,
            in the form of `form_for`.
        train_mode: generate in train mode, as trainers of trl do.
        generate_kwargs: for `generate`, such as `use_cache=False`; they win over the above.
    """
    if prompts is None:
        prompts = [(_FORMS[form_for(tokenizer)](prompt), answer) for prompt, answer in sums()]
    pairs = list(prompts)
    texts = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt, _ in pairs
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    batch = batch.to(model.device)
    options = {"max_new_tokens": 4, "do_sample": sampled, "pad_token_id": tokenizer.pad_token_id}
    options |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
    was_training = model.training
    model.train(train_mode)
    try:
        with torch.no_grad(), random_state(seed):
            out = model.generate(**batch, **(options | generate_kwargs))
    finally:
        model.train(was_training)
    completions = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(reward(completions, [answer for _, answer in pairs])) / len(pairs)
