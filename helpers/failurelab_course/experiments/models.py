"""The small Qwen2 that every run of this course trains, and its task: sums of two numbers from 0 to 19.

A failure of training shows only where there is something to lose. So the model that ships can do part of the task, and
GRPO makes it better within a minute on two CPU cores: a run that is broken, silently or not, does not. Other models go
by the same function: a folder, a hub id, or Qwen2-0.5B's exact shape with random weights, for questions of memory.

What goes wrong when a model is loaded, and is an error here: weights that a checkpoint lacks are drawn at random by
`from_pretrained`, which says so in a warning only.

Without a network each call of `from_pretrained` tries for half a minute, even where the model lies in the cache since
yesterday: HF_HUB_ETAG_TIMEOUT limits one try and not the five that follow. So the hub is asked once, shortly; where it
does not answer, only the cache is looked at.
"""

import contextlib
import functools
import json
import pathlib
import re
import urllib.error
import urllib.request
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from failurelab.errors import FailureLabError
from failurelab_course import eras
from failurelab_course.experiments import devices
from failurelab_course.experiments.task import accuracy as accuracy
from failurelab_course.experiments.task import as_chat as as_chat
from failurelab_course.experiments.task import equal_length_rows as equal_length_rows
from failurelab_course.experiments.task import form_for as form_for
from failurelab_course.experiments.task import random_state
from failurelab_course.experiments.task import reward as reward
from failurelab_course.experiments.task import rows as rows
from failurelab_course.experiments.task import sums as sums

NAMES = ("tiny", "random-0.5b")
_HUB_PATIENCE = 5.0  # seconds
_THETA = 10000.0  # what Qwen2's config takes where nothing is said
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


class ModelError(FailureLabError):
    """A model cannot be found or loaded; the message says what was found, why it matters and the next step."""


def path(name: str) -> pathlib.Path:
    """Return the folder of a model that lies on this machine: `tiny`, or a folder itself.

    Raises:
        ModelError: `name` is no such model, or the folder is missing.
    """
    if name == "tiny":
        try:
            folder = eras.root() / _TINY
        except eras.EraError as error:
            raise ModelError(f"the small Qwen2 cannot be found: {error} Or give a model's own folder.") from error
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
    name: str = "tiny", *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, in eval mode, and its tokenizer, padding on the left.

    Args:
        name: `tiny` (the small Qwen2 that ships), `random-0.5b` (the shape of Qwen2-0.5B with random weights, and the
            small model's tokenizer), a folder, or a hub id such as `Qwen/Qwen2-0.5B-Instruct`.
        device: where the model is put; `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: of the weights.

    Raises:
        ModelError: the model is unknown, not to be fetched, incomplete or corrupt.
        TierError: the device cannot be used, or has not the memory.
    """
    device = devices.resolve(device)
    if name == "random-0.5b":
        return _half_billion(torch.device(device), dtype)
    where = source(name)
    try:
        AutoConfig.from_pretrained(where)  # first: it says most clearly what is missing
        tokenizer = AutoTokenizer.from_pretrained(where, padding_side="left")
        model, info = AutoModelForCausalLM.from_pretrained(where, output_loading_info=True, **{dtype_key(): dtype})
    except Exception as error:  # hub, safetensors, json and shape errors share no narrower class
        raise loading_error(name, error) from error
    if info["missing_keys"] or info.get("mismatched_keys"):
        absent = sorted([*info["missing_keys"], *map(str, info.get("mismatched_keys", ()))])
        raise ModelError(
            f"the weights of {name!r} are incomplete: {len(absent)} parameters are not in the checkpoint, such as "
            f"{absent[0]}. They would be random numbers. Next: get the checkpoint again."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    size = sum(parameter.nbytes for parameter in model.parameters())
    devices.require_memory(size / devices.GIB, device, f"the model {name}")
    return model.to(device).eval(), tokenizer


def load_four_bit(device: str = "cpu", **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the small Qwen2 in nf4, computing in float32, and its tokenizer; `options` are of its BitsAndBytesConfig."""
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **options
    )
    given = {"quantization_config": quantization, "device_map": {"": device}, dtype_key(): torch.float32}
    model = AutoModelForCausalLM.from_pretrained(path("tiny"), **given)
    return model, AutoTokenizer.from_pretrained(path("tiny"), padding_side="left")


def untrained(config: type[transformers.PretrainedConfig], seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a small model of an architecture with random weights and without dropout, in eval mode.

    The weights are ten times as wide as transformers draws them, so that a completion depends on its prompt.

    Args:
        config: the architecture's, such as `LlamaConfig`.
        seed: of the weights; torch's own random numbers stay as they are.
        changes: of the config; its vocabulary is 500 tokens.
    """
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = config(**{**sizes, **heads, **ends, **changes})
    for name in {name for name in vars(settings) if name.endswith(("dropout", "pdrop"))} - set(changes):
        setattr(settings, name, 0.0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(settings)
    return model.eval()


def source(name: str) -> str:
    """Return what `from_pretrained` reads a model from: a folder, or a hub name where the hub answers.

    Raises:
        ModelError: the model is unknown, `random-0.5b`, which lies nowhere, or incomplete; or the hub does not answer,
            and the cache has nothing of that name.
    """
    if not is_hub_name(name):
        where = path(name)
        _check_folder(where)
        return str(where)
    if not hub_problem():
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, local_files_only=True)
    except OSError as error:
        raise loading_error(name, error) from error


def is_hub_name(name: str) -> bool:
    """Whether `name` is written as a hub name, such as `Qwen/Qwen2-0.5B-Instruct`, and is no folder here."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not pathlib.Path(name).expanduser().is_dir()


@functools.cache
def hub_problem() -> str:
    """Return why the hub cannot be asked from this process, asked once; empty if it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_HUB_PATIENCE).close()
    except urllib.error.HTTPError:
        return ""  # an answer, if a strange one
    except OSError as error:
        return f"{constants.ENDPOINT} does not answer ({getattr(error, 'reason', error)})"
    return ""


def loading_error(name: str, error: Exception) -> ModelError:
    """Return the error that says why the model of this name could not be loaded; `error` is what the library raised."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if is_hub_name(name):
        if hub_problem():
            reason = f"{hub_problem()}, and the cache has not what is needed."
        return ModelError(
            f"{name} is no folder here and could not be fetched from the hub: {reason} "
            "Next: check the spelling and the network; without a network use a folder, tiny or random-0.5b."
        )
    return ModelError(
        f"the model in {path(name)} cannot be loaded, a file is corrupt or does not fit the others: "
        f"{type(error).__name__}: {reason} Next: get the checkpoint again (git checkout, or a new download)."
    )


def dtype_key() -> str:
    """Return what this transformers calls the keyword for the weights' dtype: `dtype`, or `torch_dtype` before 4.56."""
    return "dtype" if hasattr(transformers.PretrainedConfig(), "dtype") else "torch_dtype"


def _half_billion(device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(path("tiny"), padding_side="left")
    config = transformers.Qwen2Config(
        **HALF_BILLION, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    devices.require_memory(0.5e9 * dtype.itemsize / devices.GIB, device, "the model random-0.5b")
    with random_state(0), device:
        model = AutoModelForCausalLM.from_config(config, **{dtype_key(): dtype})
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
    if not _is_5():
        _check_readable(folder)


def _check_readable(folder: pathlib.Path) -> None:
    """Find what transformers 5 has written and older ones read wrong, or not at all, in an era of theirs."""
    files = {"config.json": {}, "tokenizer_config.json": {}}
    for name in files:
        with contextlib.suppress(OSError, ValueError):  # another error will tell
            files[name] = json.loads((folder / name).read_text(encoding="utf-8"))
    problem, step = "", ""
    if files["tokenizer_config.json"].get("tokenizer_class") == "TokenizersBackend":
        problem = "its tokenizer_config.json names a class that older ones do not have"
        step = 'write "tokenizer_class": "PreTrainedTokenizerFast" there'
    theta = (files["config.json"].get("rope_parameters") or {}).get("rope_theta", _THETA)
    if "rope_theta" not in files["config.json"] and theta != _THETA:
        problem = (
            f"its config.json has rope_theta in rope_parameters, where older ones do not look: they take {_THETA:g}"
        )
        step = f'write "rope_theta": {theta} into config.json as well'
    if problem:
        raise ModelError(
            f"{folder} was saved by transformers 5, and transformers {transformers.__version__} reads it otherwise: "
            f"{problem}. Next: {step}."
        )


def _is_5() -> bool:
    """Whether this transformers has the tokenizers' base class that transformers 5 writes into folders."""
    return hasattr(transformers, "TokenizersBackend")
