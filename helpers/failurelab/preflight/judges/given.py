"""What a trainer is given and cannot take: a container or a class in the place of the thing itself.

The error that comes of it names an attribute that is missing, lines below in a library, and not what was given. So each
is told as it is handed over, with what is expected there.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import sys
import types
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch

from failurelab.handles import is_async
from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.rows import of_trl
from failurelab.preflight.repairs import Arguments, Keyword
from failurelab.preflight.training import Training

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
    elif of_trl(trainer) and hasattr(dataset, "column_names") and hasattr(dataset, "__len__"):
        yield from _rows(dataset, own=not functions or not type(trainer).__module__.startswith("trl"))
    for place, function in enumerate(functions if isinstance(functions, (list, tuple)) else [functions]):
        if isinstance(function, str) and callable(getattr(sys.modules.get("__main__"), function, None)):
            what = f"the text {function!r}, which is a model's name there, and the script has a function of this name"
            repair = f"Give the function: {function}, without quotes."
            yield _wrong(f"reward_funcs[{place}]", what, "a function, a model, or a model's name", repair)
        elif function is not None and not callable(function) and not isinstance(function, (str, torch.nn.Module)):
            part = f"reward_funcs[{place}]"
            what = f"{type(function).__name__} {str(function)[:40]!r}, which cannot be called"
            yield _wrong(part, what, "a function, a model, or a model's name", "Give the function, and do not call it.")
        elif callable(function) and not isinstance(function, torch.nn.Module) and of_trl(trainer):
            yield from _lacks(f"reward_funcs[{place}]", function, trainer)
    for name, wanted in (("model", "a model or its name"), ("args", "training arguments"), ("processing_class", "")):
        thing = keywords.get(name)
        if isinstance(thing, type):
            repair = f"Make one: {thing.__name__}{'.from_pretrained(...)' * hasattr(thing, 'from_pretrained')}."
            yield _wrong(name, f"the class {thing.__name__}", wanted or "a tokenizer", repair)
    if of_trl(trainer) and isinstance(keywords.get("args"), Mapping):
        yield _wrong("args", "a dict", "training arguments", "Make them of it: GRPOConfig(**args).")
    yield from _texts(keywords.get("args"))


def _texts(args: Any) -> Iterator[Finding]:
    """Yield training arguments that are texts of numbers: so YAML reads 1e-6, for it wants a dot and a sign there."""
    for field in dataclasses.fields(args) if dataclasses.is_dataclass(args) else ():
        value = vars(args).get(field.name)
        if isinstance(value, str) and isinstance(field.default, (int, float)):
            with contextlib.suppress(ValueError):
                number = float(value)
                repair = f"Write {number!r}, in YAML with a dot (1.0e-6), or give float({field.name})."
                undo = Arguments({field.name: number})
                what = f"the text {value!r}, as YAML reads a number like 1e-6"
                yield dataclasses.replace(_wrong(field.name, what, "a number", repair), undo=undo)


def _rows(dataset: Any, own: bool) -> Iterator[Finding]:
    """Yield what no trainer of trl can draw from: no rows, no prompts, and prompts that are token ids.

    Args:
        dataset: to train on.
        own: whether the trainer may read rows in another way than trl's with reward functions do.
    """
    if not len(dataset):
        repair = "Look at what filters it: print(len(dataset)) behind each step that makes it."
        yield _wrong("train_dataset", f"a {type(dataset).__name__} of 0 rows", "one row or more", repair)
    if own or not len(dataset):
        return
    prompt = dataset[0].get("prompt", "")
    if "prompt" not in dataset[0]:
        repair = "Make it of the others: dataset.map(...), or rename_column(..., 'prompt')."
        what = f"a dataset with the columns {', '.join(dataset.column_names)}"
        yield _wrong("train_dataset", what, "the column prompt", repair)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        what = f"a dataset whose prompts are lists of token ids ({str(prompt)[:40]} …)"
        repair = "Give the text, or messages: trl applies the chat template and tokenizes them itself."
        yield _wrong("train_dataset", what, "texts or messages", repair)


def _lacks(part: str, function: Any, trainer: Any) -> Iterator[Finding]:
    """Yield what the installed trl asks of a reward function, and this one has not: a name, or an answer at once."""
    known, kind = vars(importlib.import_module("trl.trainer.utils")), type(function).__name__
    names = any(each.__name__ in ("GRPOTrainer", "RLOOTrainer") for each in type(trainer).__mro__)
    name = getattr(function, "__name__", kind)
    if is_async(function) and not any("event_loop" in each for each in known):
        repair = "Give a plain function, which may call asyncio.run(...), or install a later trl."
        what = f"{name}, which is async: it returns a coroutine that this trl never awaits"
        yield _wrong(part, what, "a function that returns the rewards", repair)
    elif names and not hasattr(function, "__name__") and "get_callable_name" not in known:
        repair = "Give a function (def) that calls it, or set its __name__ before the trainer is made."
        what = f"a {kind}, which has no __name__: this trl logs rewards by it, and an AttributeError ends the run"
        yield _wrong(part, what, "a callable with a __name__", repair)


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
        tried = f"with {without} it takes them" if without else ""
        yield Finding(
            FAILURE, evidence, repair, Arguments(dict(undo)) if undo else None, tried, ends=True, part="arguments"
        )


def _mapped_under_zero3(training: Training) -> Iterator[Finding]:
    """Yield the loads of the script that give a device map where ZeRO-3 divides the weights; trl's own map is none."""
    loads = [(load.name, load.options) for load in training.loads if not load.by_trainer]
    init = training.arguments.get("model_init_kwargs")
    loads += [("the trainer's model", init)] if isinstance(init, dict) else []
    for name, options in loads if training.zero_stage == 3 else ():
        if options.get("device_map") is not None:
            evidence = f"{name} is loaded with device_map={options['device_map']!r}, and DeepSpeed's ZeRO-3 divides it"
            why = "transformers refuses that where the training arguments are made before the model, and not else"
            yield Finding.suspected(FAILURE, evidence, why, "Leave device_map out.", part="device_map")


def judge_deepspeed(training: Training) -> Iterator[Finding]:
    """Yield what a DeepSpeed configuration has otherwise than the training arguments, by transformers' comparison."""
    yield from _mapped_under_zero3(training)
    own, launch = training.arguments.get("deepspeed"), training.deepspeed
    if not own and not launch:
        return
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    where = "the DeepSpeed configuration of the training arguments" if own else (
        f"the DeepSpeed configuration {launch['file']}" if launch["file"] else "the launch's DeepSpeed configuration"
    )  # fmt: skip
    refused = "" if own else launch["refused"]
    try:
        config = HfDeepSpeedConfig(own).config if own else launch["config"]
        contradictions = {} if refused else _contradictions(config, training, by_launch=not own)
    except ValueError as error:
        refused = " ".join(str(error).split())
    if refused:
        why = "the file may be another on the machine that trains"
        repair = "Give it a file that is there, and set what stands in it nowhere else."
        yield Finding.suspected(FAILURE, f"{where}: {refused}", why, repair, part="deepspeed", ends=True)
        return
    if not contradictions:
        other = {"gradient_accumulation_steps": (training.arguments.get("gradient_accumulation_steps") or 1) + 1}
        if _contradictions(config | other, training, by_launch=not own):
            agrees = f"{where} contradicts no training argument, by transformers' own comparison"
            control = f"with gradient_accumulation_steps {other['gradient_accumulation_steps']} it would"
            yield Finding.held(FAILURE, agrees, control, part="deepspeed")
        return
    undo = {name: value for name, value in contradictions.values() if name}
    set_ = " and ".join(f"{name}={value!r}" for name, value in undo.items())
    yield Finding(
        FAILURE,
        f"{where} contradicts the training arguments ({'; '.join(contradictions)}): transformers ends in a ValueError "
        "when training begins",
        f"Write 'auto' there{f', or set {set_}' * bool(undo)}.",
        Arguments(undo) if undo else None,
        part="deepspeed",
        ends=True,
    )


def _contradictions(config: dict[str, Any], training: Training, by_launch: bool) -> dict[str, tuple[str, Any]]:
    """Return what transformers finds to contradict, in its words, each with the argument and the value that undo it.

    The name of the argument is empty where no single one does.

    Args:
        config: of DeepSpeed, as it stands in its file.
        training: with the arguments as the script gave them.
        by_launch: whether accelerate hands it on, which writes its precision into it.

    Raises:
        ValueError: accelerate refuses the configuration: for its precision, say.
    """
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    if not config.get("zero_optimization"):
        raise ValueError("it has no zero_optimization, which accelerate asks for")
    arguments, kind = training.arguments, type(training.trainer.args)
    steps = arguments.get("max_steps") or -1
    given = types.SimpleNamespace(**arguments, world_size=training.world_size)
    given.get_warmup_steps = functools.partial(kind.get_warmup_steps, given)
    # its __init__ makes it known to all loads of models, and asks for an installed DeepSpeed: so that is not called
    compared: Any = object.__new__(type("Compared", (HfTrainerDeepSpeedConfig, HfDeepSpeedConfig), {}))
    HfDeepSpeedConfig.__init__(compared, config)
    compared.mismatches, compared._dtype = [], None
    if by_launch:
        plugin = object.__new__(DeepSpeedPlugin)
        plugin.hf_ds_config, plugin.deepspeed_config, plugin.enable_msamp = compared, compared.config, False
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        plugin.set_mixed_precision("fp16" if given.fp16 else "bf16" if given.bf16 else launched)
    compared.trainer_config_process(given)
    if steps > 0 and "scheduler" in compared.config:
        with contextlib.suppress(ValueError):  # which it raises where anything contradicts
            compared.trainer_config_finalize(given, training.trainer.model, steps)
    contradictions = {}
    for line in compared.mismatches:  # "- ds KEY=VALUE vs hf NAME=VALUE"
        key, name = line.removeprefix("- ds ").partition("=")[0], line.partition(" vs hf ")[2].rpartition("=")[0]
        name = name.partition("|")[0]  # as in "bf16|bf16_full_eval"
        contradictions[line.removeprefix("- ")] = (name if name in arguments else "", compared.get_value(key))
    return contradictions


def _no_dataset(dataset: Any, make: str, what: str) -> Finding:
    undo = Keyword("trainer", "train_dataset", f"datasets.Dataset.{make}", imports="import datasets")
    repair = f"Make a Dataset of it: datasets.Dataset.{make.replace('{}', 'rows')}."
    return _wrong("train_dataset", what, "a datasets.Dataset", repair, undo=undo)


def _wrong(part: str, what: str, wanted: str, repair: str, tried: str = "", undo: Keyword | None = None) -> Finding:
    evidence = f"{part} is {what}; the trainer takes {wanted} there"
    return Finding(FAILURE, evidence, repair, undo, part=part, ends=True, tried=tried)
