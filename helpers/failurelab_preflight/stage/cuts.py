"""Training arguments, datasets and batches cut, so that three steps cost seconds; what was asked for is kept.

Arguments are made as the script gives them, by trl's and transformers' own validation, but for what this machine has
not: GPUs, engines, and the script's folder. They are cut in place when a trainer is made with them, so until then the
script's code reads what it wrote, and from then on the batch that is really there. The judges see what was asked for.
"""

import collections
import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import itertools
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
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


ALWAYS_AS_GIVEN = {  # also while it trains, for callbacks: no step is made of these
    "logging_steps", "logging_strategy", "max_steps", "total_episodes", "save_strategy", "eval_strategy",
    "evaluation_strategy", "load_best_model_at_end", "resume_from_checkpoint", "disable_tqdm", "optim",
}  # fmt: skip
_STAND_INS = {
    "use_vllm": "transformers generates in the place of vllm",
    "report_to": "nothing is reported",
}


# What only the engine has of which `use_vllm` asks: the model on it, and what it gives beside the tokens.
_OF_ENGINE = re.compile(r"vllm|\bllm\b|log_?p(s|rob)", re.IGNORECASE)
_LAST = 3  # frames of an error that are read


def made_error(error: BaseException, uncut: Mapping[str, Any]) -> str:
    """Return the option that is cut away, and for want of which an error may have come; empty where none is.

    The stand-in for vLLM gives no log-probabilities, and there is no engine for a script to ask.
    """
    if not uncut.get("use_vllm") or not isinstance(error, (TypeError, AttributeError, KeyError, AssertionError)):
        return ""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)[-_LAST:]]
    return "use_vllm" if _OF_ENGINE.search("\n".join([str(error), *lines])) else ""


def _wants(value: Any) -> bool:
    """Whether an option asks for what stands in for it is told of: not where it names what is the default, or none."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(option not in (None, False, "", "none", "all", "tensorboard") for option in values)


def _values(arguments: Any) -> dict[str, Any]:
    # a trainer of the script's own may be given something else under this name, such as a namespace of argparse
    fields = dataclasses.fields(arguments) if dataclasses.is_dataclass(arguments) else ()
    return {field.name: getattr(arguments, field.name, None) for field in fields}


_AT_ONCE = (  # what transformers would act on while arguments are made, and folders that the script may write to
    *_NO_GPU, "output_dir", "logging_dir", "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "ddp_backend",
    "torch_compile", "torch_compile_backend", "torch_compile_mode", "report_to", "push_to_hub",
)  # fmt: skip


class CutArguments:
    """The training arguments of a script: uncut, by name, and how they were cut.

    `note` is called with each arguments object while it is made.
    `by_trainer` is whether a trainer is being made now: arguments that it makes itself are cut at once.
    `whole` is whether the numbers of a batch, and lengths, stay as they were given.
    """

    def __init__(
        self,
        steps: int,
        output_dir: str,
        note: Callable[[Any], None] = lambda arguments: None,
        processes: Processes = Processes(),
        by_trainer: Callable[[], bool] = lambda: False,
        whole: bool = False,
    ):
        self._by_trainer, self._whole = by_trainer, whole
        self.steps, self.output_dir, self._note = steps, output_dir, note
        self._processes = processes
        self.made: list[Any] = []
        self._given: dict[int, dict[str, Any]] = {}  # of each, by its id, as the script gave it
        self._at_once: dict[int, dict[str, Any]] = {}  # what stood there instead while it was made
        self._stood: dict[int, dict[str, Any]] = {}  # as it was when it was cut
        self._cuts: dict[int, dict[str, Any]] = {}
        self._makes_twin = False

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Inside, arguments are made for the launch, and of what this machine has."""
        from transformers import TrainingArguments

        original, own_size = TrainingArguments.__post_init__, TrainingArguments.world_size

        def post_init(arguments: Any) -> None:
            if self._makes_twin:
                return original(arguments)
            given = self._given[id(arguments)] = _values(arguments)
            self.made.append(arguments)
            self._note(arguments)
            cut = self._cut(given)
            if self._by_trainer():
                self._cuts[id(arguments)] = self._at_once[id(arguments)] = cut
            else:
                self._at_once[id(arguments)] = {name: cut[name] for name in _AT_ONCE if name in cut}
            for name, value in self._at_once[id(arguments)].items():
                setattr(arguments, name, value)
            return original(arguments)

        def world_size(arguments: Any) -> int:  # by which trl divides
            launched = self._processes.launch > 1 and id(arguments) not in self._cuts
            return self._processes.launch if launched else own_size.fget(arguments)

        with (
            mock.patch.object(TrainingArguments, "__post_init__", post_init),
            mock.patch.object(TrainingArguments, "world_size", property(world_size)),
        ):
            yield

    def _as_made(self, arguments: Any) -> dict[str, Any]:
        """Return what arguments were when they were made: their class makes them once more."""
        twin = object.__new__(type(arguments))
        vars(twin).update(self._given[id(arguments)] | self._at_once[id(arguments)])
        self._makes_twin = True
        try:
            twin.__post_init__()
        finally:
            self._makes_twin = False
        return _values(twin)

    def _round_of(self, uncut: Mapping[str, Any]) -> tuple[int, int]:
        """Return the completions of a round of generation and the passes that they are for, as trl makes them."""
        each = uncut["per_device_train_batch_size"] * self._processes.launch
        steps = uncut.get("steps_per_generation") or uncut.get("gradient_accumulation_steps") or 1
        if per_round := uncut.get("generation_batch_size"):
            return per_round, uncut.get("steps_per_generation") or max(1, per_round // each)
        return each * steps, steps

    def settle(self, arguments: Any) -> None:
        """Cut arguments whose trainer is made now; what the script set since they were made is asked for, too."""
        now = _values(arguments)
        if not now:
            return
        if id(arguments) not in self._given:  # a copy
            self.made.append(arguments)
            self._note(arguments)
            self._given[id(arguments)] = now | (
                {"generation_batch_size": None} if now.get("steps_per_generation") else {}
            )
            self._stood[id(arguments)] = now
        given = self._given[id(arguments)]
        stood = self._stood.get(id(arguments)) or self._as_made(arguments)
        late = {name: value for name, value in now.items() if value is not stood[name] and value != stood[name]}
        if late.keys() & {*_BATCH} and "generation_batch_size" in given:  # which trl has made of the other numbers
            (made, steps), generations = self._round_of(given), max(1, now["num_generations"])
            together = now["per_device_train_batch_size"] * self._processes.launch * steps
            splits = made % generations or together % generations
            given |= {"generation_batch_size": made, "steps_per_generation": None} if splits else {
                "generation_batch_size": None, "steps_per_generation": steps
            }  # fmt: skip
        given.update(late)
        cut = self._cuts[id(arguments)] = self._cut(given)
        values = cut | {name: given[name] for name in _BATCH if name in given and name not in cut}
        if "generation_batch_size" in given:
            each, per_round = (
                values["per_device_train_batch_size"] * self._processes.real,
                values["generation_batch_size"],
            )
            passes = max(1, per_round // each) if per_round else values["gradient_accumulation_steps"] or 1
            passes = values["steps_per_generation"] = values["steps_per_generation"] or passes
            values["generation_batch_size"] = per_round or each * passes
        values |= {name: stood[name] for name in _AT_ONCE if name in values}  # as it was made of what was cut then
        for name, value in values.items():
            kind = type(now[name])
            setattr(arguments, name, kind(value) if issubclass(kind, enum.Enum) and isinstance(value, str) else value)
        arguments.do_eval = False
        self._stood[id(arguments)] = _values(arguments)

    def uncut(self, arguments: Any) -> dict[str, Any]:
        """Return the arguments as the script asked for them, also what it set after they were made."""
        now = _values(arguments)
        given, cut = self._given.get(id(arguments), now), self._cuts.get(id(arguments), {})
        return given | {name: now[name] for name in cut if name not in _DERIVED and now[name] != cut[name]}

    def last_uncut(self) -> dict[str, Any]:
        """Return the arguments that were made last, as the script asked for them; empty if there are none."""
        return self._given[id(self.made[-1])] if self.made else {}

    def cuts(self, arguments: Any) -> list[str]:
        """Return what of the work was cut, a text each, such as `max_completion_length 256 -> 8`."""
        uncut = self._given.get(id(arguments), _values(arguments))
        stand_ins = [f"{name}: {said}" for name, said in _STAND_INS.items() if _wants(uncut.get(name))]
        return self.cut_numbers(arguments) + stand_ins

    def cut_numbers(self, arguments: Any) -> list[str]:
        """Return which numbers were cut, a text each; a trainer's making may refuse them, and training go on so."""
        uncut, cut = self._given.get(id(arguments), _values(arguments)), self._cuts.get(id(arguments), {})
        names = ["per_device_train_batch_size", "num_generations", *_AT_MOST]
        names += ["gradient_accumulation_steps", "num_iterations"]
        names = [name for name in names if name in cut and uncut[name] is not None and cut[name] < uncut[name]]
        return [f"{name} {uncut[name]} -> {cut[name]}" for name in names if "eval" not in name]

    def _cut(self, uncut: dict[str, Any]) -> dict[str, Any]:
        launch, real = self._processes.launch, self._processes.real
        cut = {**_SET, **_OFF, **({} if torch.cuda.is_available() and real == 1 else _NO_GPU)}
        cut |= {"output_dir": self.output_dir, "logging_dir": None, "max_steps": self.steps}
        for name, limit in _AT_MOST.items():
            if isinstance(uncut.get(name), int) and not self._whole:
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
