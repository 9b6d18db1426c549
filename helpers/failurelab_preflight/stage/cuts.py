"""Training arguments, datasets and batches cut, so that three steps cost seconds; what was asked for is kept.

The arguments are cut before the trainer's own validation, which would refuse a cut that does not divide; the judges
see what the script asked for. So does the script's own code, which may make a second config of a first one: until a
trainer is made with them, arguments are read there as they were given. From then on the script sees the batch that is
really there, for its functions may cut it into groups; how long is trained, and when is logged, saved and evaluated, is
still what it asked for. What the script writes into arguments later is what it asked for too, and is cut in turn.
"""

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import importlib.metadata
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from packaging.version import Version

from failurelab.failures import release
from failurelab.handles import is_unseen
from failurelab_preflight.stage.own_code import OwnCode

PROMPTS, GENERATIONS = 2, 4  # of one batch at most: two prompts, for padding
TWICE = 2  # accumulated steps, and iterations, at most: two show what more would
NEW_TOKENS, WINDOW = 8, 64  # tokens generated, and positions that a batch of texts keeps
_ROWS = 512  # of a dataset that a trainer tokenizes
_LOOKED_AT = 256  # rows among which the shortest are trained on
_OFF = dict.fromkeys(  # False for a run that saves and reports nothing, on a CPU or a GPU
    (
        "push_to_hub", "load_best_model_at_end", "torch_compile", "use_vllm", "log_completions", "auto_find_batch_size",
        "use_transformers_paged", "use_transformers_continuous_batching", "sync_ref_model", "use_liger_kernel",
        "use_liger_loss", "predict_with_generate", "include_tokens_per_second",
    ),
    False,
)  # fmt: skip
_NO_GPU = dict.fromkeys(("fp16", "tf32", "bf16_full_eval", "fp16_full_eval", "padding_free"), False) | {
    "use_cpu": True,
    "dataloader_pin_memory": False,
}
_SET: dict[str, Any] = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "evaluation_strategy": None,
    "report_to": [],
    "run_name": None,
    "logging_steps": 1,
    "logging_strategy": "steps",
    "disable_tqdm": True,
    "resume_from_checkpoint": None,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "num_generations_eval": None,
    "num_iterations": 1,
    "num_ppo_epochs": 1,
    "num_mini_batches": 1,
    "num_sample_generations": 0,
    "rloo_k": 2,
    "deepspeed": None,
    "fsdp": "",
    "fsdp_config": None,
    "parallelism_config": None,
    "ddp_backend": None,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "dataset_num_proc": None,
    "skip_memory_metrics": True,
    "log_completions_hub_repo": None,
}
_AT_MOST = {
    "max_completion_length": NEW_TOKENS,
    "max_new_tokens": NEW_TOKENS,
    "response_length": NEW_TOKENS,
    "max_prompt_length": WINDOW,
    "per_device_eval_batch_size": PROMPTS,
    "local_rollout_forward_batch_size": PROMPTS,
}


@dataclasses.dataclass(frozen=True)
class Processes:
    """How many processes there are: of the launch as it was asked for, and of this run, which cuts them too."""

    launch: int = 1
    real: int = 1


_IN_TORCH = ("adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop")


_FOLDERS = ("output_dir", "logging_dir", "run_name")  # that the script may write to: those of this run
ALWAYS_AS_GIVEN = {  # also while it trains, for callbacks: no step is made of these
    "logging_steps", "logging_strategy", "max_steps", "total_episodes", "save_strategy", "eval_strategy",
    "evaluation_strategy", "load_best_model_at_end", "resume_from_checkpoint", "disable_tqdm", "optim",
}  # fmt: skip
# Functions of a library's that read all arguments for whoever calls them.
_PASS_ON = ("to_dict", "to_json_string", "to_sanitized_dict", "<dictcomp>")

_STAND_INS = {
    "use_vllm": "transformers generates in the place of vllm",
    "report_to": "nothing is reported",
}


_OF_A_ROUND = ("steps_per_generation", "generation_batch_size")  # which trl makes of the others, where none is given


def _is_cut(name: str, value: Any, cut: Mapping[str, Any]) -> bool:
    """Whether an argument still stands as it was cut, or as trl has made it of others that were."""
    return value == cut[name] or (name in _OF_A_ROUND and cut[name] is None)


def _wants(value: Any) -> bool:
    """Whether an option asks for what stands in for it is told of: not where it names what is the default, or none."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(option not in (None, False, "", "none", "all", "tensorboard") for option in values)


def _values(arguments: Any) -> dict[str, Any]:
    # a trainer of the script's own may be given something else under this name, such as a namespace of argparse
    fields = dataclasses.fields(arguments) if dataclasses.is_dataclass(arguments) else ()
    return {field.name: getattr(arguments, field.name, None) for field in fields}


class _Values(dict[str, Any]):
    """The values of an object, some shown as others; what is written goes to the object."""

    def __init__(self, values: dict[str, Any], shown: dict[str, Any]):
        super().__init__(values | shown)
        self._own = values

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._own[name] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class CutArguments:
    """The training arguments of a script: uncut, by name, and how they were cut.

    `note` is called with each arguments object while it is made.
    `own` is the script's code, which reads arguments as they were given; None lets all code read them as they were cut.
    `whole` is how much stays as it was given: with 1 the numbers of a batch, with 2 lengths too.
    """

    def __init__(
        self,
        steps: int,
        output_dir: str,
        note: Callable[[Any], None] = lambda arguments: None,
        processes: Processes = Processes(),
        own: OwnCode | None = None,
        whole: int = 0,
    ):
        self._own, self._with_trainer, self._whole = own, set[int](), whole
        self.steps, self.output_dir, self._note = steps, output_dir, note
        self._processes = processes
        self.made: list[Any] = []
        self._rounds: dict[int, tuple[int, int]] = {}  # completions of a round, and its passes, as they were made
        self._known: list[tuple[Any, Any]] = []  # these and their copies, each with the ones that were made
        self._kept: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []  # of each: uncut, cut, as made
        self._refused: dict[int, tuple[str, dict[str, Any]]] = {}  # by id: what transformers says, and what undoes it

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Inside, every TrainingArguments is cut as it is made, and read by the script's own code as it was given."""
        from transformers import TrainingArguments

        original, get = TrainingArguments.__post_init__, TrainingArguments.__getattribute__
        write = TrainingArguments.__setattr__

        def read(arguments: Any, name: str) -> Any:
            value = get(arguments, name)
            if name not in _READ or self._own is None or not self._own.asks(through=_PASS_ON, through_here=False):
                return value
            uncut, cut, _ = self._of(arguments, ({}, {}, {}))
            shown = cut.keys() & (ALWAYS_AS_GIVEN if id(arguments) in self._with_trainer else _ALL_CUT)
            if name == "__dict__":  # as vars() asks for it
                known = {key: value[key] for key in shown if _is_cut(key, value[key], cut)}
                return _Values(value, {key: self._as_made(uncut, key, each) for key, each in known.items()})
            is_cut = name in shown and _is_cut(name, value, cut)
            return self._as_made(uncut, name, value) if is_cut else value

        def written(arguments: Any, name: str, value: Any) -> None:
            write(arguments, name, value)
            if self._own is not None and self._own.asks(through=_PASS_ON, through_here=False):
                for other, new in self._set_later(arguments, name, value).items():
                    write(arguments, other, new)

        def copied(arguments: Any, memo: dict[int, Any] | None = None) -> Any:
            """Copy arguments, deep with a memo, with what is known of them."""
            new, values = object.__new__(type(arguments)), get(arguments, "__dict__")
            get(new, "__dict__").update(values if memo is None else copy.deepcopy(values, memo))
            if kept := self._of(arguments, None):
                self._known.append((new, self.origin(arguments)))
                uncut, cut, made = map(dict, kept) if memo is None else copy.deepcopy(kept, memo)
                self._kept.append((uncut, cut, made))
            return new

        def post_init(arguments: Any) -> None:
            uncut = _values(arguments)
            cut = self._cut(uncut)
            values: dict[str, Any] = {}
            for name, value in cut.items():
                setattr(arguments, name, value)
            self.made.append(arguments)
            self._known.append((arguments, arguments))
            self._kept.append((uncut, cut, values))
            self._note(arguments)
            before = dict(get(arguments, "__dict__"))
            original(arguments)
            values.update(_values(arguments))
            if refused := _refusal(type(arguments), before, uncut, original):
                self._refused[id(arguments)] = refused

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(TrainingArguments, "__post_init__", post_init))
            if self._own is not None:
                stack.enter_context(mock.patch.object(TrainingArguments, "__getattribute__", read))
                stack.enter_context(mock.patch.object(TrainingArguments, "__setattr__", written))
            for name in ("__copy__", "__deepcopy__"):
                stack.enter_context(mock.patch.object(TrainingArguments, name, copied, create=True))
            yield

    def _as_made(self, uncut: Mapping[str, Any], name: str, value: Any) -> Any:
        """Return an argument as it would stand there uncut: what was given, or what is made of the others then."""
        given = uncut[name]
        if isinstance(value, enum.Enum) and isinstance(given, str):
            return type(value)(given)
        if given is not None or name not in _OF_A_ROUND:
            return given
        per_round, steps = self._round_of(uncut)
        return steps if name == "steps_per_generation" else per_round

    def _round_of(self, uncut: Mapping[str, Any]) -> tuple[int, int]:
        """Return the completions of a round of generation and the passes that they are for, as trl makes them."""
        each = uncut["per_device_train_batch_size"] * self._processes.launch
        steps = uncut.get("steps_per_generation") or uncut.get("gradient_accumulation_steps") or 1
        if per_round := uncut.get("generation_batch_size"):
            return per_round, uncut.get("steps_per_generation") or max(1, per_round // each)
        return each * steps, steps

    def _set_later(self, arguments: Any, name: str, value: Any) -> dict[str, Any]:
        """Note what the script sets on arguments that are made; return what stands there instead, cut like the rest."""
        uncut, cut, values = self._of(arguments, ({}, {}, {}))
        if name not in values:  # they are being made, or are not known
            return {}
        if name in _BATCH and "generation_batch_size" in uncut and id(uncut) not in self._rounds:
            self._rounds[id(uncut)] = self._round_of(uncut)
        uncut[name] = value
        if name not in cut:
            return {}
        if name in _AT_MOST and isinstance(value, int):
            cut[name] = min(value, _AT_MOST[name])
        if name not in _BATCH:
            return {name: cut[name]}
        if id(arguments) in self._with_trainer:  # which has read it by now
            del cut[name]
            return {}
        return self._cut_again(uncut, cut)

    def _cut_again(self, uncut: dict[str, Any], cut: dict[str, Any]) -> dict[str, Any]:
        """Cut a batch again, of which a number was changed since; return what the arguments are to hold.

        Of a release that makes a round of generation of the other numbers, that round stays as it was made.
        """
        names = [name for name in _BATCH if name in uncut]
        if id(uncut) in self._rounds:
            (made, steps), generations = self._rounds[id(uncut)], max(1, uncut["num_generations"])
            together = uncut["per_device_train_batch_size"] * self._processes.launch * steps
            splits = made % generations or together % generations
            uncut |= {"generation_batch_size": made, "steps_per_generation": None} if splits else {
                "generation_batch_size": None, "steps_per_generation": steps
            }  # fmt: skip
        new = self._cut(uncut)
        cut.update({name: new.get(name, uncut[name]) for name in names})
        if "generation_batch_size" in names:
            each, per_round = cut["per_device_train_batch_size"] * self._processes.real, cut["generation_batch_size"]
            passes = max(1, per_round // each) if per_round else cut["gradient_accumulation_steps"] or 1
            passes = cut["steps_per_generation"] = cut["steps_per_generation"] or passes
            cut["generation_batch_size"] = per_round or each * passes
        return {name: cut[name] for name in names}

    def settle(self, arguments: Any) -> None:
        """Take what the script has set on its arguments since they were made as asked: their trainer is made now."""
        self._with_trainer.add(id(arguments))
        values = _values(arguments)
        uncut, cut, values = self._of(arguments, (values, {}, values))
        late = {name: value for name, value in _values(arguments).items() if name not in cut}
        uncut.update({name: value for name, value in late.items() if value is not values[name]})
        if cut:
            arguments.output_dir = self.output_dir  # which the script may have set since

    def uncut(self, arguments: Any) -> dict[str, Any]:
        """Return the arguments as the script asked for them, also what it set after they were made."""
        uncut, cut, _ = self._of(arguments, (_values(arguments), {}, {}))
        late = {name: getattr(arguments, name) for name in cut if name not in _DERIVED}
        return uncut | {name: value for name, value in late.items() if value != cut[name]}

    def refused(self, arguments: Any) -> tuple[str, dict[str, Any]]:
        """Return what transformers says of arguments that it does not take as they were given, and what undoes it.

        Empty where it takes them. They are those of evaluation, saving and loading, which are cut here.
        """
        return self._refused.get(id(self.origin(arguments)), ("", {}))

    def last_uncut(self) -> dict[str, Any]:
        """Return the arguments that were made last, as the script asked for them; empty if there are none."""
        return self._kept[-1][0] if self._kept else {}

    def origin(self, arguments: Any) -> Any:
        """Return the arguments that these are a copy of, or these."""
        return next((origin for known, origin in self._known if known is arguments), arguments)

    def _of(self, arguments: Any, otherwise: Any) -> Any:
        """Return these arguments uncut, cut and made; otherwise, where they were not seen to be made."""
        return next((kept for (known, _), kept in zip(self._known, self._kept) if known is arguments), otherwise)

    def cuts(self, arguments: Any) -> list[str]:
        """Return what of the work was cut, a text each, such as `max_completion_length 256 -> 8`."""
        uncut, _, _ = self._of(arguments, (_values(arguments), {}, {}))
        stand_ins = [f"{name}: {said}" for name, said in _STAND_INS.items() if _wants(uncut.get(name))]
        return self.cut_numbers(arguments) + stand_ins

    def cut_numbers(self, arguments: Any) -> list[str]:
        """Return which numbers were cut, a text each; a trainer's making may refuse them, and training go on so."""
        uncut, cut, _ = self._of(arguments, (_values(arguments), {}, {}))
        names = ["per_device_train_batch_size", "num_generations", *_AT_MOST]
        names += ["gradient_accumulation_steps", "num_iterations"]
        names = [name for name in names if name in cut and uncut[name] is not None and cut[name] < uncut[name]]
        return [f"{name} {uncut[name]} -> {cut[name]}" for name in names if "eval" not in name]

    def _cut(self, uncut: dict[str, Any]) -> dict[str, Any]:
        launch, real = self._processes.launch, self._processes.real
        cut = {**_SET, **_OFF, **({} if torch.cuda.is_available() and real == 1 else _NO_GPU)}
        cut |= {"output_dir": self.output_dir, "logging_dir": None, "max_steps": self.steps}
        for name, limit in _AT_MOST.items():
            if isinstance(uncut.get(name), int) and self._whole < 2:
                cut[name] = min(uncut[name], limit)
        if uncut.get("load_best_model_at_end") and uncut.get("metric_for_best_model") is None:
            cut["metric_for_best_model"] = "loss"  # which transformers makes of it, and callbacks read
        cut["per_device_train_batch_size"] = PROMPTS
        if "rloo_k" in uncut:
            cut |= {"per_device_train_batch_size": 2 * PROMPTS, "total_episodes": 2 * PROMPTS * self.steps}
        if "max_new_tokens" in uncut:  # Online DPO draws for each micro-batch, and does not divide by their number
            cut["gradient_accumulation_steps"] = min(uncut.get("gradient_accumulation_steps") or 1, TWICE)
        if isinstance(uncut.get("num_generations"), int):
            cut |= _cut_batch(uncut, self._processes)
            if is_refused(uncut, launch):  # by trl itself then, before anything is trained
                cut = {name: value for name, value in cut.items() if name not in (*_BATCH, *_EVALUATION)}
                if evaluated := uncut.get("per_device_eval_batch_size"):
                    cut["per_device_eval_batch_size"] = max(1, evaluated * launch // real)
                whole = uncut["per_device_train_batch_size"] * launch
                # fewer processes have the same batch together, or twice that, for groups of twice the size
                twice = bool(whole % real)
                cut["per_device_train_batch_size"] = whole if twice else whole // real
                for name in ("num_generations", "generation_batch_size") if twice else ():
                    cut |= {name: real * uncut[name]} if uncut.get(name) else {}
        if self._whole:
            cut = {name: value for name, value in cut.items() if name not in (*_BATCH, "num_iterations")}
            if launch > real:
                cut["per_device_train_batch_size"] = max(1, uncut["per_device_train_batch_size"] * launch // real)
        optimizer = str(getattr(uncut.get("optim"), "value", uncut.get("optim")))
        if optimizer not in _IN_TORCH and not torch.cuda.is_available():
            cut["optim"] = "adamw_torch"
        return {name: value for name, value in cut.items() if name in uncut}


_ALL_CUT = {
    *_SET, *_OFF, *_NO_GPU, *_AT_MOST, "per_device_train_batch_size", "num_generations", "max_steps", "total_episodes",
    "optim",
} - {*_FOLDERS}  # fmt: skip
_READ = {*_ALL_CUT, "__dict__"}

# Which transformers compares with one another while arguments are made, and which are cut before that.
_COMPARED = (
    "load_best_model_at_end", "eval_strategy", "evaluation_strategy", "save_strategy", "dataloader_prefetch_factor",
    "dataloader_num_workers", "logging_steps", "logging_strategy",
)  # fmt: skip


def _refusal(
    kind: type, before: dict[str, Any], uncut: dict[str, Any], original: Callable[..., None]
) -> tuple[str, dict[str, Any]] | None:
    """Return why transformers refuses what the script gave, and the argument without which it does not; else None."""

    def said(names: Iterable[str]) -> str:
        probe: Any = object.__new__(kind)
        vars(probe).update(before | {name: uncut[name] for name in names})
        try:
            original(probe)
        except ValueError as error:
            return " ".join(str(error).split())
        except Exception:  # of what is not here, such as an accelerator
            return ""
        return ""

    names = [name for name in _COMPARED if name in before]
    refused = said(names)
    if not refused:
        return None
    healing = (name for name in names if not said(other for other in names if other != name))
    return refused, {name: before[name] for name in itertools.islice(healing, 1)}


_BATCH = (
    "per_device_train_batch_size", "num_generations", "gradient_accumulation_steps", "steps_per_generation",
    "generation_batch_size",
)  # fmt: skip
_EVALUATION = ("eval_strategy", "evaluation_strategy", "num_generations_eval")  # for which trl wants whole groups too


def is_refused(uncut: Mapping[str, Any], world_size: int) -> bool:
    """Return whether trl refuses a batch of this size on so many processes; so does no release before 0.15."""
    return not counts_prompts() and (_possible(uncut, world_size) is not None or _splits_groups(uncut, world_size))


def evaluates(arguments: Mapping[str, Any]) -> bool:
    """Return whether these arguments ask for an evaluation while it trains."""
    strategies = (arguments.get(name) for name in ("eval_strategy", "evaluation_strategy"))
    return any(getattr(value, "value", value) not in (None, "no") for value in strategies)


def _splits_groups(uncut: Mapping[str, Any], world_size: int) -> bool:
    """Return whether an evaluation is asked for whose batch holds no whole groups."""
    generations = uncut.get("num_generations_eval") or uncut["num_generations"]
    return evaluates(uncut) and bool(uncut["per_device_eval_batch_size"] * world_size % max(1, generations))


def make_divide(uncut: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return training arguments with which trl takes the batch: another number of generations, if one divides it."""
    possible = _possible(uncut, world_size)
    if possible is None and _splits_groups(uncut, world_size):
        generations = uncut.get("num_generations_eval") or uncut["num_generations"]
        return {"per_device_eval_batch_size": generations // math.gcd(generations, world_size)}
    if possible:
        return {"num_generations": min(possible, key=lambda count: (abs(count - uncut["num_generations"]), count))}
    if possible is None or uncut["num_generations"] < 2:
        return {"num_generations": 2, "per_device_train_batch_size": 2}
    values = {"per_device_train_batch_size": uncut["num_generations"]}
    return values | ({"generation_batch_size": None} if uncut.get("generation_batch_size") else {})


def _possible(uncut: Mapping[str, Any], world_size: int) -> list[int] | None:
    """Return the numbers of generations that divide a round of generation, where the asked one does not; else None."""
    generations, each = uncut["num_generations"], uncut["per_device_train_batch_size"] * world_size
    steps, per_round = uncut.get("steps_per_generation"), uncut.get("generation_batch_size")
    if steps and per_round:
        return []
    accumulated = uncut.get("gradient_accumulation_steps") or 1
    if per_round is None:
        per_round = each * (steps or accumulated) if "steps_per_generation" in uncut else each
    if per_round % each:
        return []
    fits = generations > 1 and per_round % generations == 0
    return None if fits else [count for count in range(2, per_round + 1) if per_round % count == 0]


def _cut_batch(uncut: dict[str, Any], processes: Processes = Processes()) -> dict[str, Any]:
    """Return a batch of the script's own kind: as many prompts in a generation, accumulated steps and iterations.

    At most two of each. A batch of one prompt is never padded, so failures of padding are not there. Where a process
    has too few completions for a group, groups lie across processes here too.
    """
    device, wanted = uncut["per_device_train_batch_size"], uncut.get("gradient_accumulation_steps") or 1
    generations, accumulated = max(2, min(uncut["num_generations"], GENERATIONS)), min(wanted, TWICE)
    cut = {"num_iterations": min(uncut.get("num_iterations") or 1, TWICE), "gradient_accumulation_steps": accumulated}
    if counts_prompts():
        return cut | {"num_generations": generations, "per_device_train_batch_size": min(device, PROMPTS)}
    lasts = steps = 1  # optimizer passes that one generation gives completions to; one where it is made for each
    if "steps_per_generation" in uncut:
        per_round = uncut.get("generation_batch_size")
        lasts = uncut.get("steps_per_generation") or (max(1, per_round // device) if per_round else wanted)
        if lasts == wanted:
            steps = accumulated
        else:  # the loss is divided by the tokens of another number of passes than are accumulated
            accumulated = cut["gradient_accumulation_steps"] = accumulated if lasts < wanted else 1
            steps = cut["steps_per_generation"] = 1 if lasts < wanted else TWICE
    together = device * lasts * processes.launch // uncut["num_generations"]
    share, rest = divmod(max(1, min(together, PROMPTS)) * generations, processes.real * steps)
    if processes.real > 1 and device * lasts < uncut["num_generations"] and not rest:
        return cut | {"num_generations": generations, "per_device_train_batch_size": share}
    prompts = max(1, min(device * lasts // uncut["num_generations"], PROMPTS))
    if prompts * generations % steps:
        generations = 2
    return cut | {"num_generations": generations, "per_device_train_batch_size": prompts * generations // steps}


_DERIVED = (  # by the arguments themselves, while they are made
    "generation_batch_size", "steps_per_generation", "report_to", "run_name", "logging_dir", "fsdp", "fsdp_config",
    "eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy", "optim", "deepspeed",
)  # fmt: skip


def counts_prompts() -> bool:
    """Whether this trl's batch size counts prompts, each with all its completions: so did 0.14."""
    try:
        return release(importlib.metadata.version("trl")) < Version("0.15")
    except importlib.metadata.PackageNotFoundError:
        return False


def generates_for_one(arguments: Any) -> bool:
    """Whether a GRPO trainer with these arguments generates for one prompt at a time, so that nothing is padded."""
    generations = getattr(arguments, "num_generations", None)
    if not generations:
        return False
    if counts_prompts():
        return arguments.per_device_train_batch_size == 1
    together = arguments.per_device_train_batch_size * (getattr(arguments, "steps_per_generation", None) or 1)
    return together <= generations


def cut_rows(dataset: Any) -> Any:
    """Return the first rows of a dataset that a trainer tokenizes as a whole; another thing as it is."""
    if isinstance(dataset, dict):
        return {name: cut_rows(part) for name, part in dataset.items()}
    if callable(getattr(dataset, "select", None)) and len(dataset) > _ROWS:
        return dataset.select(range(_ROWS))
    return dataset


def choose_short(dataset: Any, rows: int) -> Any:
    """Return short rows, by characters, among a dataset's first ones; a dataset that cannot be chosen from as it is.

    They differ in length, from the shortest to the middle one, or to longer ones where these are too few: batches are
    padded then as those of the whole.
    """
    if not callable(getattr(dataset, "select", None)) or len(dataset) <= rows:
        return dataset
    looked_at = range(min(len(dataset), _LOOKED_AT))
    sizes = {index: _size(dataset[index]) for index in looked_at}
    if len(set(sizes.values())) == 1 and len(dataset) > _LOOKED_AT:  # those behind may differ
        looked_at = range(0, len(dataset), len(dataset) // _LOOKED_AT)
        sizes = {index: _size(dataset[index]) for index in looked_at}
    by_size = sorted(looked_at, key=sizes.__getitem__)
    first_of_size = list({sizes[index]: index for index in reversed(by_size)}.values())[::-1]  # from the shortest on
    middle = sizes[by_size[len(by_size) // 2]]
    shorter = [index for index in first_of_size if sizes[index] <= middle]
    differing = shorter[:: max(1, len(shorter) // rows)] if len(shorter) >= rows else first_of_size
    turns = collections.defaultdict[int, Iterator[int]](itertools.count)
    turn = {index: next(turns[sizes[index]]) for index in by_size}  # of each size as many, so that batches differ
    others = sorted((index for index in by_size if index not in differing), key=turn.__getitem__)
    return dataset.select((differing + others)[:rows])


def _size(row: Any) -> int:
    """Return the characters of a row's prompt; of a row without one, all of it."""
    return len(str(row.get("prompt", row) if isinstance(row, Mapping) else row))


@contextlib.contextmanager
def cut_generation(own: OwnCode) -> Iterator[list[str]]:
    """Inside, `generate` draws no more tokens for the script's own code than for the trainer, as in a rollout function.

    Yields a list that gets a text of each cut.
    """
    from transformers import GenerationMixin

    original, cuts = GenerationMixin.generate, list[str]()

    @functools.wraps(original)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_unseen() and own.asks(through=("generate", "decorate_context")):  # peft's hands it on
            config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
            ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
            names = ("max_new_tokens", "max_length", "min_new_tokens")
            most, length, least = (kwargs.get(name) or getattr(config, name, None) for name in names)
            prompt = ids.shape[-1] if isinstance(ids, torch.Tensor) else 0
            tokens = most or (length or 0) - prompt
            if tokens > NEW_TOKENS:
                cuts.append(f"generate of the script's own, max_new_tokens {tokens} -> {NEW_TOKENS}")
                kwargs.pop("max_length", None)
                kwargs |= {"max_new_tokens": NEW_TOKENS} | ({"min_new_tokens": min(least, NEW_TOKENS)} if least else {})
        return original(model, *args, **kwargs)

    with mock.patch.object(GenerationMixin, "generate", generate):
        yield cuts


def cut_batches(collator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collator whose batches hold the last positions of each text alone, where the answers are."""

    @functools.wraps(collator, updated=())
    def collate(*args: Any, **kwargs: Any) -> Any:
        batch = collator(*args, **kwargs)
        ids = batch.get("input_ids") if hasattr(batch, "get") else None
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] <= WINDOW or "pixel_values" in batch:
            return batch
        counted = batch.get("labels", batch.get("attention_mask"))
        counted = torch.ones_like(ids) if counted is None or counted.shape != ids.shape else counted
        used = ((counted != -100) & (counted != 0)).any(0).nonzero()
        end = max(WINDOW, int(used[-1]) + 1) if len(used) else ids.shape[1]
        for name, value in list(batch.items()):
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == ids.shape:
                batch[name] = value[:, end - WINDOW : end]
        return batch

    return collate
