"""What a trainer is given and cannot take: a container or a class in the place of the thing itself.

The error that comes of it names an attribute that is missing, lines below in a library, and not what was given. So each
is told as it is handed over, with what is expected there.
"""

import sys
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch

from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.rows import of_trl
from failurelab.preflight.repairs import Arguments, Keyword

FAILURE = "given"


def judge_given(keywords: Mapping[str, Any], trainer: Any) -> Iterator[Finding]:
    """Yield what is given in another form than the trainer takes.

    Args:
        keywords: the arguments of the call that makes the trainer, by name.
        trainer: that is being made; only its class is looked at.
    """
    dataset, functions = keywords.get("train_dataset"), keywords.get("reward_funcs")
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(str, dataset))
        split = "train" if "train" in dataset else next(iter(dataset), "train")
        size = f" of {len(dataset[split])} rows" if hasattr(dataset.get(split), "__len__") else ""
        yield _wrong(
            "train_dataset",
            f"a {type(dataset).__name__} with {splits}",
            "one dataset",
            f"Give one of them: train_dataset=dataset[{split!r}], or split={split!r} of load_dataset.",
            f"dataset[{split!r}] is a {type(dataset.get(split)).__name__}{size}",
            Keyword("trainer", "train_dataset", f"{{}}[{split!r}]"),
        )
    elif of_trl(trainer) and isinstance(dataset, (list, tuple)):
        yield _no_dataset(dataset, "from_list({})", f"a {type(dataset).__name__} of {len(dataset)}")
    elif of_trl(trainer) and isinstance(dataset, Generator):
        yield _no_dataset(dataset, "from_list(list({}))", "a generator")
    elif of_trl(trainer) and type(dataset).__module__.startswith("pandas."):
        yield _no_dataset(dataset, "from_pandas({})", f"a pandas {type(dataset).__name__}")
    elif of_trl(trainer) and isinstance(dataset, (str, type)):
        yield _wrong(
            "train_dataset",
            f"{dataset!r}",
            "a datasets.Dataset",
            "Load it: datasets.load_dataset(name, split='train').",
        )
    for place, function in enumerate(functions if isinstance(functions, (list, tuple)) else [functions]):
        if isinstance(function, str) and callable(getattr(sys.modules.get("__main__"), function, None)):
            what = f"the text {function!r}, which is a model's name there, and the script has a function of this name"
            repair = f"Give the function: {function}, without quotes."
            yield _wrong(f"reward_funcs[{place}]", what, "a function, a model, or a model's name", repair)
        elif function is not None and not callable(function) and not isinstance(function, (str, torch.nn.Module)):
            part = f"reward_funcs[{place}]"
            what = f"{type(function).__name__} {str(function)[:40]!r}, which cannot be called"
            yield _wrong(part, what, "a function, a model, or a model's name", "Give the function, and do not call it.")
    for name, wanted in (("model", "a model or its name"), ("args", "training arguments"), ("processing_class", "")):
        thing = keywords.get(name)
        if isinstance(thing, type):
            repair = f"Make one: {thing.__name__}{'.from_pretrained(...)' * hasattr(thing, 'from_pretrained')}."
            yield _wrong(name, f"the class {thing.__name__}", wanted or "a tokenizer", repair)
    if of_trl(trainer) and isinstance(keywords.get("args"), Mapping):
        yield _wrong("args", "a dict", "training arguments", "Make them of it: GRPOConfig(**args).")


def judge_refused(said: str, undo: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what transformers says of training arguments that it refuses as they were given, if it does.

    Args:
        said: by transformers, which has compared the arguments that are cut here; empty if nothing.
        undo: the argument without which it takes them, and the value that says so.
    """
    if said:
        without = " and ".join(f"{name}={value!r}" for name, value in undo.items())
        repair = f"Set {without}, or the others as it asks for." if without else "Set them as it asks for."
        evidence = f"transformers refuses these training arguments: {said}"
        more = {"part": "arguments", "ends": True, "tried": f"with {without} it takes them" if without else ""}
        yield Finding(FAILURE, evidence, repair, Arguments(dict(undo)) if undo else None, **more)


def _no_dataset(dataset: Any, make: str, what: str) -> Finding:
    undo = Keyword("trainer", "train_dataset", f"datasets.Dataset.{make}", imports="import datasets")
    repair = f"Make a Dataset of it: datasets.Dataset.{make.replace('{}', 'rows')}."
    return _wrong("train_dataset", what, "a datasets.Dataset", repair, undo=undo)


def _wrong(part: str, what: str, wanted: str, repair: str, tried: str = "", undo: Keyword | None = None) -> Finding:
    evidence = f"{part} is {what}; the trainer takes {wanted} there"
    return Finding(FAILURE, evidence, repair, undo, part=part, ends=True, tried=tried)
