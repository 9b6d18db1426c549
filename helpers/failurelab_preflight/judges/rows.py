"""What judges read of a script: rows of its dataset, prompts as its trainer makes ids of them, its libraries."""

import importlib.metadata
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from packaging.version import Version

from failurelab_preflight.training import Training


def sample(training: Training, count: int, prepared: bool = False) -> list[dict[str, Any]]:
    """Return at most `count` rows of the script's dataset: the same ones of it each time, or the first of a stream.

    They are drawn, for kinds of rows that alternate would be left out by every second one.

    Args:
        training: of the script.
        count: of rows, at most.
        prepared: the rows as the trainer made them, with ids in place of texts.
    """
    dataset = None if prepared else training.dataset
    dataset = getattr(training.trainer, "train_dataset", None) if dataset is None else dataset
    if dataset is None:
        return []
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        size = len(dataset)
        places = sorted(random.Random(0).sample(range(size), count)) if size > count else range(size)
        rows = [dataset[place] for place in places]
    else:
        rows = list(itertools.islice(iter(dataset), count))
    return [dict(row) for row in rows if isinstance(row, Mapping)]


def dataset_size(training: Training) -> int | None:
    """Return how many rows the script's dataset has; None of a stream, and of several datasets."""
    counted = hasattr(training.dataset, "__len__") and not isinstance(training.dataset, Mapping)
    return len(training.dataset) if counted else None


def prompted(training: Training, count: int) -> list[dict[str, Any]]:
    """Return the rows of `sample` that have a prompt."""
    return [row for row in sample(training, count) if row.get("prompt")]


def generates(trainer: Any) -> bool:
    """Return whether a trainer draws completions of its own: GRPO, RLOO, Online DPO, and what is derived from them."""
    return any(getattr(trainer, name, None) for name in ("reward_funcs", "reward_model", "judge"))


def of_trl(trainer: Any) -> bool:
    """Return whether a trainer is one of trl's, or derived from one."""
    return any(kind.__module__.partition(".")[0] == "trl" for kind in type(trainer).__mro__)


def tokenizer_of(trainer: Any) -> Any:
    """Return the trainer's tokenizer; of a processor for images, the one inside."""
    processor = getattr(trainer, "processing_class", None) or getattr(trainer, "tokenizer", None)
    return getattr(processor, "tokenizer", processor)


def known_ends(trainer: Any) -> set[int]:
    """Return the tokens at which a trainer sees a completion end."""
    return token_ids(getattr(trainer, "eos_token_ids", None)) or {tokenizer_of(trainer).eos_token_id}


def own_ends(model: Any) -> set[int]:
    """Return the tokens that end a model's texts, by its generation config."""
    return token_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))


def token_ids(value: Any) -> set[int]:
    """Return the ids of an option that takes none, one or several."""
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def prompt_ids(trainer: Any, prompts: Sequence[Any], other: Any = None) -> list[list[int]]:
    """Return the ids of prompts, as the trainer makes them; uncut.

    trl 1.x has a method for it, which is asked. Elsewhere the chat template is rendered, if the prompt has messages,
    and no special tokens are added (trl 0.26 to 0.29 add them to plain text, which is not followed). A trainer without
    a tokenizer of its own is asked with the other one.
    """
    own = getattr(trainer, "_tokenize_prompts", None)
    if own is not None:
        # which environment each prompt has is known to trl in a step alone: here all have the first
        names = [next(iter(getattr(trainer, "environment_factories", None) or [None]))] * len(prompts)
        with mock.patch.object(trainer, "_batch_environments", names, create=True):
            return [list(ids) for ids in own(list(prompts))[0]]
    tokenizer = tokenizer_of(trainer) or other
    texts = [prompt if isinstance(prompt, str) else render_prompt(trainer, prompt, tokenizer) for prompt in prompts]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def render_prompt(trainer: Any, prompt: Sequence[Mapping[str, Any]], tokenizer: Any, **options: Any) -> str:
    """Return the text that a trainer makes of messages by the chat template; one of the assistant's is gone on with."""
    options = {"tokenize": False, **(getattr(trainer, "chat_template_kwargs", None) or {}), **options}
    if template := getattr(trainer, "chat_template", None):
        options["chat_template"] = template
    goes_on = "continue_final_message" if prompt[-1]["role"] == "assistant" else "add_generation_prompt"
    return tokenizer.apply_chat_template(prompt, **{goes_on: True, **options})


def prompt_limit(training: Training) -> int | None:
    """Return how many tokens of a prompt are kept; None where nothing is cut: trl 0.26 and 0.27 only warn of it."""
    warns = Version("0.26") <= installed_version("trl") < Version("0.28")
    return None if warns else training.arguments.get("max_prompt_length")


def installed_version(package: str) -> Version:
    """Return the release of a package; 0 where it is not installed."""
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Version("0")
