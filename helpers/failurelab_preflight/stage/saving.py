"""What a script saves before it trains lies in the run's temporary folder, and a load of the script's folder finds it.

A tokenizer is kept as it is, and an adapter with the weights of the cut model. Of a model its configuration is kept,
of the whole one; with `--real-model`, and of a model that is small already, its weights too.
"""

import contextlib
import copy
import functools
import hashlib
import importlib.util
import inspect
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from failurelab_preflight.stage import models


@contextlib.contextmanager
def elsewhere(output: str | os.PathLike, loads: list[models.Load], real: bool = False) -> Iterator[None]:
    """Inside, models, adapters and tokenizers are saved below `output`; loads of the same folders find them there.

    That folder is taken away with the run. `loads` are of the script's models; `real` ones are kept with their weights.
    """
    from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.auto import auto_factory

    saved = _Saved(pathlib.Path(output))

    def save_model(original: Callable[..., None], model: Any, folder: pathlib.Path, *args: Any, **options: Any) -> None:
        whole = not models.is_cut(model) and models.is_few(type(model), model.config)
        if real or whole:
            original(model, folder, *args, **options)
        if real:
            return
        load = next((load for load in loads if load.name == model.config._name_or_path), None)
        config = copy.deepcopy(load.config if load and not whole else model.config)
        setattr(config, models.dtype_argument(), getattr(torch, load.dtype) if load else model.dtype)
        config.save_pretrained(folder)

    with contextlib.ExitStack() as stack:
        stack.enter_context(saved.writing("model", PreTrainedModel, save_model))
        stack.enter_context(saved.reading("model", PretrainedConfig, "get_config_dict"))
        stack.enter_context(saved.reading("model", PreTrainedModel))
        stack.enter_context(saved.reading("model", models, "is_small", "name"))
        # An Auto class looks into the folder before any class of a model does.
        stack.enter_context(saved.reading("model", auto_factory, "find_adapter_config_file", "model_id"))
        if hasattr(auto_factory, "cached_file"):  # transformers 4
            stack.enter_context(saved.reading("model", auto_factory, "cached_file", "path_or_repo_id"))
        stack.enter_context(saved.writing("tokenizer", PreTrainedTokenizerBase))
        for kind in (AutoTokenizer, PreTrainedTokenizerBase):
            stack.enter_context(saved.reading("tokenizer", kind))
        if importlib.util.find_spec("peft") is not None:
            from peft import PeftConfig, PeftModel

            stack.enter_context(saved.writing("adapter", PeftModel))
            stack.enter_context(saved.reading("adapter", PeftConfig))
            stack.enter_context(saved.reading("adapter", PeftModel, argument="model_id"))
        yield


class _Saved:
    """Where the things lie that were saved, by what they are and by the script's folder."""

    def __init__(self, output: pathlib.Path):
        self._output = output  # which all ranks of a launch have: one saves, and all load

    def _folder(self, path: str) -> pathlib.Path:
        return self._output / f"saved-{hashlib.sha256(path.encode()).hexdigest()[:16]}"

    def _mark(self, what: str, path: str) -> pathlib.Path:
        """Return the file that says that a thing of this kind was saved."""
        return self._folder(path).with_suffix(f".{what}")

    def writing(
        self,
        what: str,
        kind: type,
        save: Callable[..., Any] = lambda original, *args, **options: original(*args, **options),
    ) -> Any:
        """Inside, `save_pretrained` of that class gets another folder."""
        original = vars(kind)["save_pretrained"]

        @functools.wraps(original)
        def save_pretrained(thing: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
            path = os.path.realpath(save_directory)
            done = save(original, thing, self._folder(path), *args, **options)
            self._mark(what, path).touch()
            return done

        return mock.patch.object(kind, "save_pretrained", save_pretrained)

    def reading(
        self, what: str, owner: Any, name: str = "from_pretrained", argument: str = "pretrained_model_name_or_path"
    ) -> Any:
        """Inside, that class method, or function of a module, finds what was saved."""
        method = inspect.ismethod(getattr(owner, name))
        original = getattr(owner, name).__func__ if method else getattr(owner, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def read(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            bound.arguments[argument] = self._find(what, bound.arguments[argument])
            return original(*bound.args, **bound.kwargs)

        return mock.patch.object(owner, name, classmethod(read) if method else read)

    def _find(self, what: str, name: Any) -> Any:
        """Return the folder where a thing of that name lies; PEFT saves a named adapter in a folder below."""
        if not isinstance(name, str | os.PathLike):
            return name
        path = pathlib.Path(os.path.realpath(name))
        for above, below in ((path, ""), (path.parent, path.name)):
            if (below == "" or what == "adapter") and self._mark(what, str(above)).exists():
                return str(self._folder(str(above)) / below)
        return name
