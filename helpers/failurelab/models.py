"""The small Qwen2 that every run of this course trains, and its task: sums of two numbers from 0 to 19.

A failure of training shows only where there is something to lose. So the model that ships can do part of the task, and
GRPO makes it better within a minute on two CPU cores: a run that is broken, silently or not, does not. Other models go
by the same function: a folder, a hub id, or Qwen2-0.5B's exact shape with random weights, for questions of memory.

What goes wrong when a model is loaded, and is an error here: weights that a checkpoint lacks are drawn at random by
`from_pretrained`, which says so in a warning only.
"""

import contextlib
import os
import pathlib
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | list[dict[str, str]]
NAMES = ("tiny", "random-0.5b")
_TINY = pathlib.Path("models", "tiny-qwen2")
# Qwen2-0.5B as published: https://huggingface.co/Qwen/Qwen2-0.5B-Instruct/blob/main/config.json
HALF_BILLION = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


class ModelError(Exception):
    """A model cannot be found or loaded; the message says what was found, why it matters and the next step."""


def path(name: str) -> pathlib.Path:
    """Return the folder of a model that lies on this machine: `tiny`, or a folder itself.

    Raises:
        ModelError: `name` is no such model, or the folder is missing.
    """
    if name == "tiny":
        folder = _root() / _TINY
        if not folder.is_dir():
            raise ModelError(
                f"the small Qwen2 is missing: no folder {folder}. Every run of the course starts from it. "
                f"Next: git checkout -- {_TINY}, or train it again with models/train_tiny_qwen2.py."
            )
        return folder
    folder = pathlib.Path(name).expanduser()
    if folder.is_dir():
        return folder
    raise ModelError(
        f"unknown model {name!r}: neither a folder nor one of {', '.join(NAMES)}. Next: give one of these, a folder "
        "with config.json and weights, or a hub id such as Qwen/Qwen2-0.5B-Instruct."
    )


def load(
    name: str = "tiny", *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, in eval mode, and its tokenizer, padding on the left.

    Args:
        name: `tiny` (the small Qwen2 that ships), `random-0.5b` (the shape of Qwen2-0.5B with random weights, and the
            small model's tokenizer), a folder, or a hub id such as `Qwen/Qwen2-0.5B-Instruct`.
        device: where the model is put.
        dtype: of the weights; None is float32.
        seed: of the random weights; the caller's random state is left as it was.

    Raises:
        ModelError: the model is unknown, not to be fetched, incomplete or corrupt.
    """
    dtype = dtype or torch.float32
    if name == "random-0.5b":
        return _half_billion(torch.device(device), dtype, seed)
    if name != "tiny" and not pathlib.Path(name).expanduser().is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        source = name
    else:
        source = str(path(name))
        _check_folder(pathlib.Path(source))
    try:
        AutoConfig.from_pretrained(source)  # first, for without a network each of these calls tries for half a minute
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
        model, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **{dtype_key(): dtype})
    except Exception as error:  # hub, safetensors, json and shape errors share no narrower class
        raise ModelError(_why(name, source, error)) from error
    if info["missing_keys"] or info.get("mismatched_keys"):
        absent = sorted([*info["missing_keys"], *map(str, info.get("mismatched_keys", ()))])
        raise ModelError(
            f"the weights of {name!r} are incomplete: {len(absent)} parameters are not in the checkpoint, such as "
            f"{absent[0]}. They would be random numbers. Next: get the checkpoint again."
        )
    return model.to(device).eval(), tokenizer


def dtype_key() -> str:
    """Return what this transformers calls the keyword for the weights' dtype: `dtype`, or `torch_dtype` before 4.56."""
    return "dtype" if hasattr(transformers.PretrainedConfig(), "dtype") else "torch_dtype"


def _root() -> pathlib.Path:
    """Return the repository's root: FAILURELAB_ROOT, else above this file, else above the working directory."""
    named = os.environ.get("FAILURELAB_ROOT")
    starts = [pathlib.Path(named).resolve()] if named else [pathlib.Path(__file__).resolve(), pathlib.Path.cwd()]
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / "models" / "train_tiny_qwen2.py").is_file():
                return folder
    raise ModelError(
        f"the small Qwen2 lives in the course's repository, and {starts[-1]} is not in it (no "
        "models/train_tiny_qwen2.py above it). Next: cd into your clone, set FAILURELAB_ROOT to it, or name a folder."
    )


def _half_billion(
    device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(path("tiny"), padding_side="left")
    config = transformers.Qwen2Config(
        **HALF_BILLION, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _random_state(seed), device:
            model = transformers.Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval(), tokenizer


def _check_folder(folder: pathlib.Path) -> None:
    """Find what `from_pretrained` would say less clearly, or not at all."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no model: config.json is missing. Next: name a folder made by save_pretrained.")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        raise ModelError(
            f"{folder} has no tokenizer (tokenizer.json is missing): prompts cannot be encoded. "
            "Next: save the tokenizer there too, with tokenizer.save_pretrained."
        )
    if not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        raise ModelError(f"{folder} has no weights (no *.safetensors). Next: get the checkpoint again.")


def _why(name: str, source: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if source == name and "/" in name and not pathlib.Path(name).expanduser().exists():
        return (
            f"{name} is no folder here and could not be fetched from the hub: {first} "
            "Next: check the spelling and the network; without a network use a folder, tiny or random-0.5b."
        )
    return (
        f"the model in {source} cannot be loaded, a file is corrupt or does not fit the others: "
        f"{type(error).__name__}: {first} Next: get the checkpoint again (git checkout, or a new download)."
    )


@contextlib.contextmanager
def _random_state(seed: int) -> Iterator[None]:
    """Seed torch for a block, on every device, and give the caller's random state back after it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


# The task


def sums() -> list[tuple[str, str]]:
    """Return the 400 sums as (prompt, answer), such as `("3+4=", "7")`."""
    return [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def as_chat(prompt: str) -> list[dict[str, str]]:
    """Return `prompt` as the one message of a user, for the chat template."""
    return [{"role": "user", "content": prompt}]


def rows(seed: int | None = None, repeat: int = 1, form: str = "plain") -> Any:
    """Return the sums as a `datasets.Dataset` with the columns `prompt` and `answer`, 400 rows times `repeat`.

    Args:
        seed: shuffles the rows; None leaves them in order.
        repeat: how often every sum occurs.
        form: `plain`, prompts are text; `chat`, prompts are lists of messages.

    Raises:
        ValueError: another form.
    """
    import datasets

    if form not in ("plain", "chat"):
        raise ValueError(f"unknown form {form!r}: prompts are plain or chat")
    pairs = sums() * repeat
    if seed is not None:
        random.Random(seed).shuffle(pairs)
    prompts = [prompt if form == "plain" else as_chat(prompt) for prompt, _ in pairs]
    return datasets.Dataset.from_dict({"prompt": prompts, "answer": [answer for _, answer in pairs]})


def equal_length_rows(dataset: Any, length: int | None = None) -> Any:
    """Keep the rows whose prompt has `length` characters, by default the most frequent length; none needs padding.

    The small model's tokenizer makes one token of each character, so that these prompts have equally many tokens.

    Raises:
        ValueError: no row is that long.
    """
    lengths = [len(as_text(prompt)) for prompt in dataset["prompt"]]
    length = length or max(sorted(set(lengths)), key=lengths.count)
    kept = [index for index, each in enumerate(lengths) if each == length]
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
        prompts: pairs of prompt (text, or messages for the chat template) and answer; by default all 400 sums.
        train_mode: generate in train mode, as trainers of trl do.
        generate_kwargs: for `generate`, such as `use_cache=False`; they win over the above.
    """
    pairs = sums() if prompts is None else list(prompts)
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
        with torch.no_grad(), _random_state(seed):
            out = model.generate(**batch, **(options | generate_kwargs))
    finally:
        model.train(was_training)
    completions = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(reward(completions, [answer for _, answer in pairs])) / len(pairs)
