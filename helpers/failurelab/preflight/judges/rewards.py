"""F10 and F14: the script's own reward functions, each asked alone about completions whose worth is known.

`failurelab.rewards` asks and judges; here it is told what this trainer hands over, and its flags become answers.
F10 is a reward that is the same for all completions of a prompt, F14 one that never sees what it needs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version

from failurelab._unwrap import has_adapter
from failurelab.preflight import repairs
from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.batch import read_step
from failurelab.preflight.judges.rows import installed_version, prompt_ids, prompted, tokenizer_of
from failurelab.preflight.training import Training, score_head
from failurelab.rewards import forms, references, signature, survey
from failurelab.rewards.inputs import OWN, Inputs
from failurelab.rewards.table import Flag

ROWS = 4  # asked of
_LOOKED_AT = 48  # rows among which they are chosen
_MANY = 500  # rows whose kinds are looked at
_DRAWN = 4  # completions of this run that are asked about too
_COLD = 0.05  # a temperature under which the likeliest token is drawn nearly always
_PENALTY = 1.5  # of repetition, from which on it decides what is drawn; 1.0 to 1.2 are usual
_TAIL = 48  # tokens at the end of a prompt, where a template writes the beginning of the completion
_MASKED = Version("0.16")  # the first release that leaves None and NaN out of the sum
_RANDOM = "what it pays hangs on its weights, and those of a cut one are random"
_WORD, _LONGER = "word ", (4, 16)  # times max_completion_length, in words: no completion has so many letters


def judge_rewards(training: Training) -> Iterator[Finding]:
    """Call the trainer's reward functions on made-up completions; tell what they can never reward."""
    functions = getattr(training.trainer, "reward_funcs", None)
    yield from _without_a_head(training)
    if not isinstance(functions, list) or not functions:
        if getattr(training.trainer, "reward_model", None) is not None:
            yield Finding.not_checked("F10", f"rewards come from a reward model, which is not asked: {_RANDOM}")
        return
    places = [
        n for n, function in enumerate(functions) if callable(function) and not isinstance(function, torch.nn.Module)
    ]
    rows = _choose_rows(training, [functions[place] for place in places])
    if not rows:
        yield Finding.not_checked("F10", "the dataset has no column `prompt` that could be read")
        return
    if getattr(training.trainer, "environment_factories", None):
        yield Finding.not_checked("F10", "rewards come from environments, which are not entered")
        return
    if len(places) < len(functions):
        yield Finding.not_checked("F10", f"{len(functions) - len(places)} reward model(s) are not asked: {_RANDOM}")
    yield from greedy_sampling(training)
    yield from _never_called(training, functions, places)
    drawn = _drawn_with_completions(training, rows[0])
    for place in list(places):
        if read := [name for name in drawn if signature.asks_for(functions[place], name)]:
            key, what = signature.key_of(functions, place), " and ".join(read)
            why = f"{key} reads {what}, which comes with the completions that are drawn: made-up ones have none"
            yield Finding.not_checked("F14", why, part=f"reward_funcs[{place}]")
            places.remove(place)
    if places:
        yield from _survey(training, functions, places, rows)


def _without_a_head(training: Training) -> Iterator[Finding]:
    """Tell reward models whose checkpoint, by its own configuration, is a language model's: a random head scores then.

    transformers warns of it once ("newly initialized: score.weight"). A model whose head the script trains or loads
    first is left out, and so is one with an adapter, which may hold the head.
    """
    given = getattr(training.trainer, "reward_funcs", None)
    models = {f"reward_funcs[{place}]": each for place, each in enumerate(given if isinstance(given, list) else ())}
    models["reward_model"] = getattr(training.trainer, "reward_model", None)
    for part, model in models.items():
        loads = [load for load in training.loads if load.model is not None and load.model() is model]
        if not loads or loads[0].head is None or loads[0].head != score_head(model):  # none, or written to since
            continue
        if has_adapter(model) or id(model) in training.trained_elsewhere:
            continue
        kinds = getattr(loads[0].config, "architectures", None) or ()
        if kinds and all(kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for kind in kinds):
            said = (
                f"{part} is {loads[0].name}, a checkpoint of {' and '.join(kinds)}: it holds no head that gives a score"
            )
            yield Finding.suspected(
                "F14",
                f"{said}, so transformers makes a random one, and the rewards are its",
                "it is read from the checkpoint's configuration alone",
                "Name a checkpoint that was trained to score: of a class that ends in ForSequenceClassification.",
                part=part,
                fault="head",
            )


def _drawn_with_completions(training: Training, row: dict[str, Any]) -> list[str]:
    """Return what reward functions are handed for each completion and the dataset has not: a `rollout_func` made it."""
    handed = training.reward_inputs or {}
    count = len(handed.get("completions") or ())
    lists = (name for name, value in handed.items() if isinstance(value, (list, tuple)) and len(value) == count)
    return [name for name in lists if name not in OWN and name not in row]


def _survey(
    training: Training, functions: list[Any], places: list[int], rows: list[dict[str, Any]]
) -> Iterator[Finding]:
    inputs = make_inputs(training, rows)
    weights, many = signature.weights_of(training.trainer, len(functions)), prompted(training, _MANY)
    texts = {name for row in many for name, value in row.items() if isinstance(value, str)}
    result = survey.survey(
        functions, inputs,
        weights=weights, whole=len(places) == len(functions), places=places, opened=_opened(training, inputs),
        drawn=_drawn(training), masked=installed_version("trl") >= _MASKED, limits=_limits(training),
        clip=_clip_range(training), longest=_longest(training), **_call_size(training),
        kinds={name: {row[name] for row in many if isinstance(row.get(name), str)} for name in texts},
    )  # fmt: skip
    training.rewards, training.best, training.reference = result.table, result.best, result.reference
    training.not_called |= {id(functions[place]) for place in result.unasked}
    by_key = {signature.key_of(functions, place): place for place in places}
    for flag in result.table.flags:
        yield _answer(flag, functions, by_key.get(flag.about, -1), weights)


def _answer(flag: Flag, functions: list[Any], place: int, weights: list[float]) -> Finding:
    part = flag.about.partition(" ")[0]  # its place: a name may change with the repair
    if flag.verdict == "HELD":
        return Finding.held(flag.failure, flag.evidence, flag.control, part=part)
    if flag.verdict == "NOT CHECKED":
        return Finding.not_checked(flag.failure, flag.evidence, part=part)
    if flag.verdict == "SUSPECTED":
        return Finding.suspected(flag.failure, flag.evidence, flag.control, flag.repair, part=part, fault=flag.fault)
    undo = _repair(flag.fix, functions[place], place, weights)
    more: dict[str, Any] = {"tried": flag.tried, "ends": flag.ends, "part": part, "fault": flag.fault}
    return Finding(flag.failure, flag.evidence, flag.repair, undo, **more)


def _repair(fix: tuple[Any, ...], function: Any, place: int, weights: list[float]) -> repairs.Repair | None:
    """Return the edit that undoes a flag."""
    kind, *values = fix or ("",)
    if kind == "turn weight":
        return repairs.Arguments({"reward_weights": [-w if n == place else w for n, w in enumerate(weights)]})
    if kind == "rename":
        return repairs.Keyword("trainer", "train_dataset", f"{{}}.rename_column({values[0]!r}, {values[1]!r})")
    of_function = {"any keywords": repairs.AnyKeywords, "dotall": repairs.DotAll, "first line": repairs.FirstLine}
    if kind in of_function:
        return of_function[kind](function, *values)
    return repairs.Arguments(*values) if kind == "arguments" else None


def _never_called(training: Training, functions: list[Any], places: Sequence[int]) -> Iterator[Finding]:
    """Tell which functions the trainer was given and never called."""
    for place in places:
        if training.called and place not in training.called:
            key = signature.key_of(functions, place)
            yield Finding(
                "F14",
                f"{key} was never called in the training: {len(functions)} functions given, {len(training.called)} "
                "called",
                "Look why this trainer leaves it out: it calls as many functions as it has reward_processing_classes.",
                part=f"reward_funcs[{place}]",
                fault="never called",
            )


def make_inputs(training: Training, rows: list[dict[str, Any]]) -> Inputs:
    """Return what this trainer hands to its reward functions: as it was really handed over, else as releases do."""
    names, tokenizer = [name for name in rows[0] if name not in OWN], tokenizer_of(training.trainer)
    more, usual = training.reward_inputs or {}, {}
    if training.reward_inputs is not None:
        names = [name for name in names if name in training.reward_inputs]
    else:
        state = getattr(training.trainer, "state", None) or transformers.TrainerState()
        usual = {"completion_ids": None, "trainer_state": state, "log_extra": print, "log_metric": print}
        if getattr(getattr(training.trainer, "args", None), "remove_unused_columns", False):
            names = []

    def encode(texts: list[str]) -> list[Any]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    return Inputs(rows, names, more, usual, encode if tokenizer else None, special=_special_tokens(tokenizer))


def _special_tokens(tokenizer: Any) -> list[str]:
    """Return the texts that `skip_special_tokens=True` takes out of a completion, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    tokens = {str(token) for token in added.values() if token.special}
    return sorted(filter(None, {*tokens, *(getattr(tokenizer, "all_special_tokens", None) or ())}), key=len)[::-1]


def _choose_rows(training: Training, functions: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a few rows, with each value of a column that is asked for, where they are few, and each kind of number."""
    rows = prompted(training, _LOOKED_AT)
    chosen = rows[:: max(1, len(rows) // ROWS)][:ROWS]
    for name in sorted({name for function in functions for name in signature.asked_columns(function)}):
        kinds = {row[name]: row for row in reversed(rows) if isinstance(row.get(name), str)}
        if len(kinds) <= ROWS:
            chosen += [row for value, row in kinds.items() if all(value != other.get(name) for other in chosen)]
    asked = [name for each in functions for name in signature.asked_columns(each)]
    column = signature.reference_column(rows, asked) or ""
    for row in rows if column else ():
        marks = {references.number_mark(other.get(column)) for other in chosen}
        chosen += [row] * (references.number_mark(row.get(column)) not in marks)
    return chosen


def greedy_sampling(training: Training) -> Iterator[Finding]:
    """Tell what makes all completions of a prompt the same: an argument, or the model's own generation config."""
    same = "the completions of a prompt are all the same, and so are their rewards"
    given = {**training.arguments, **(training.arguments.get("generation_kwargs") or {})}
    if (penalty := given.get("repetition_penalty")) and not 1 / _PENALTY < penalty < _PENALTY:
        yield Finding.suspected(
            "F15",
            f"tokens are drawn with repetition_penalty {penalty:g}, and scored without it: what stands in the prompt "
            "or was said already is hardly drawn again (the digits of a sum, the tags of a form), whatever is learned",
            "by the arguments alone",
            "Set repetition_penalty to 1.0, or pay less for repetition in a reward.",
            undo=repairs.Arguments({"repetition_penalty": 1.0}) if "repetition_penalty" in training.arguments else None,
            part="repetition_penalty",
        )
    if greedy := _greedy(given):
        said = f"{greedy}: {same}"
        yield Finding("F10", said, "Sample: temperature=1.0, and neither top_k=1 nor do_sample=False.")
        return
    taken = training.model_defaults
    if not taken:
        return
    values = ", ".join(f"{name}={value!r}" for name, (value, _) in taken.items())
    others = ", ".join(f"{name}={other!r}" for name, (_, other) in taken.items())
    said = (
        f"tokens are drawn with {values} of the model's generation_config, which takes the place of what the trainer "
    )
    said += f"leaves at the library's default ({others})"
    if greedy := _greedy({name: value for name, (value, _) in taken.items()}):
        yield Finding(
            "F10",
            f"{said}. {greedy}: {same}",
            f"Before training: model.generation_config.update({others})",
            undo=repairs.Statement(f"{{trainer}}.model.generation_config.update({others})"),
            tried=f"with a generation_config that has none of it, {others}",
            part="generation_config",
        )
    else:
        training.notes.append(f"{said}: the loss is not of that distribution")


def _greedy(options: Mapping[str, Any]) -> str:
    """Return what in options of sampling makes all completions of a prompt the same; empty if nothing does."""
    temperature, top_p = options.get("temperature"), options.get("top_p")
    if isinstance(temperature, (int, float)) and temperature <= _COLD:
        return f"temperature is {temperature:g}"
    if isinstance(top_p, (int, float)) and top_p <= _COLD:
        return f"top_p is {top_p:g}"
    if options.get("top_k") == 1:
        return "top_k is 1"
    if (options.get("min_p") or 0) >= 1:
        return f"min_p is {options['min_p']:g}"
    return "do_sample is False" if options.get("do_sample") is False else ""


def _call_size(training: Training) -> dict[str, int]:
    """Return how many completions of a group one call of a reward function holds, where that is a part of a group."""
    step = read_step(training)
    if step is None or step.per_round is None:
        return {}
    each = step.per_round // max(training.world_size, 1)
    return {"part": each, "group": step.generations} if 0 < each < step.generations else {}


def _clip_range(training: Training) -> tuple[float, ...]:
    """Return the least and the most that this trainer lets a reward be; empty where it clips none.

    RLOO clips so from trl 0.22 on. Before, one number stood there, for rewards that were normalized alone.
    """
    clip = training.arguments.get("reward_clip_range")
    return tuple(map(float, clip)) if isinstance(clip, (list, tuple)) and len(clip) == 2 else ()


def _opened(training: Training, inputs: Inputs) -> str:
    """Return what the prompt of a generation has written of the completion: `<think>` and a line break, say."""
    prompt = inputs.rows[0]["prompt"]
    if inputs.form == "plain text":
        return forms.opened_by(prompt) if isinstance(prompt, str) else ""
    tokenizer = tokenizer_of(training.trainer)
    if not getattr(tokenizer, "chat_template", None):
        return ""
    (ids,) = prompt_ids(training.trainer, [prompt])
    return forms.opened_by(tokenizer.decode(ids[-_TAIL:], clean_up_tokenization_spaces=False))


def _drawn(training: Training) -> list[str]:
    """Return completions that this run's small model has drawn: no text is too odd to be judged."""
    completions = (training.reward_inputs or {}).get("completions") or []
    texts = [
        completion if isinstance(completion, str) else completion[-1].get("content")
        for completion in completions
        if completion
    ]
    return [text for text in texts if isinstance(text, str)][:_DRAWN]


def _longest(training: Training) -> int:
    """Return the tokens that a completion may have; 0 where that is unknown."""
    limit = training.arguments.get("max_completion_length")
    return limit if isinstance(limit, int) else 0


def _limits(training: Training) -> list[str]:
    """Return a text as long as max_completion_length lets it be, and longer ones; none where that is unknown."""
    limit, tokenizer = _longest(training), tokenizer_of(training.trainer)
    if not limit or tokenizer is None:
        return []
    longest = limit * limit // len(tokenizer(_WORD * limit, add_special_tokens=False)["input_ids"])  # in words
    return [_WORD * length for length in (longest, *(limit * times for times in _LONGER))]
