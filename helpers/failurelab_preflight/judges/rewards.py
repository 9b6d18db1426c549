"""F10 and F14: the script's own reward functions, each asked alone about completions whose worth is known.

The room `rewards` asks and judges; here it is told what this trainer hands over, and its flags become answers.
F10 is a reward that is the same for all completions of a prompt, F14 one that never sees what it needs.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version

from failurelab import plants
from failurelab.guards.reward import key_of, weights_of
from failurelab.measure import counts
from failurelab_preflight.finding import Finding, Verdict
from failurelab_preflight.judges.batch import read_step
from failurelab_preflight.judges.rows import installed_version, prompt_ids, prompted, tokenizer_of
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.rewards import forms, signature, survey
from failurelab_preflight.rewards.inputs import OWN, Inputs
from failurelab_preflight.training import Training

ROWS = 4  # asked of
_LOOKED_AT = 48  # rows among which they are chosen
_DRAWN = 4  # completions of this run that are asked about too
_TAIL = 48  # tokens at the end of a prompt, where a template writes the beginning of the completion
_MASKED = Version("0.16")  # the first release that leaves None and NaN out of the sum
_BETWEEN = ("_calculate_rewards", "_generate_and_score_completions")  # what is paid goes through them to the loss
_RANDOM = "what it pays hangs on its weights, and those of a cut one are random"


def judge_rewards(training: Training) -> Iterator[Finding]:
    """Call the trainer's reward functions on made-up completions; tell what they can never reward."""
    functions = getattr(training.trainer, "reward_funcs", None)
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
    never = [place for place in places if training.finished and place not in training.called]
    if never:
        keys = " and ".join(key_of(functions, place) for place in never)
        why = f"training never called {keys}: what is paid comes from the script's own code, which is not asked"
        for failure in ("F10", "F14"):
            yield Finding.not_checked(failure, why, part=f"reward_funcs[{never[0]}]")
        places = [place for place in places if place not in never]
    drawn = _drawn_with_completions(training, rows[0])
    for place in list(places):
        if read := [name for name in drawn if signature.asks_for(functions[place], name)]:
            key, what = key_of(functions, place), " and ".join(read)
            why = f"{key} reads {what}, which comes with the completions that are drawn: made-up ones have none"
            yield Finding.not_checked("F14", why, part=f"reward_funcs[{place}]")
            places.remove(place)
    between = [name for name in _BETWEEN if _is_own(training, getattr(type(training.trainer), name, None))]
    if not places:
        return
    inputs = make_inputs(training, rows)
    training.rewards = survey.survey(
        functions, inputs, weights=weights_of(training.trainer, len(functions)),
        whole=len(places) == len(functions), places=places, opened=_opened(training, inputs),
        drawn=_drawn(training), masked=installed_version("trl") >= _MASKED, **_call_size(training),
    )  # fmt: skip
    for finding in training.rewards.flags:
        if finding.failure == "F10" and finding.verdict is Verdict.HELD:
            finding = _judge_draws(training, finding)
        if finding.verdict is Verdict.HELD and between:  # a function alone says nothing of what is made of it
            why = f"{finding.evidence}; what the script's own {' and '.join(between)} makes of that was not asked"
            finding = Finding.not_checked(finding.failure, why, part=finding.part)
        yield finding


def _judge_draws(training: Training, told: Finding) -> Finding:
    """Return what is told of functions that pay differently, beside what was drawn for them in the run.

    Where all completions of a prompt are the same, it does not matter what a function pays.
    """
    measured = counts.of_draws(training.drawn)
    controls = {"equal completions": plants.equal_completions(training.drawn)}
    said = "in {groups_alike} of {groups_drawn} groups that were drawn all completions are the same".format(**measured)
    if settled := settle("F10", [measured], controls, said, "equal completions"):
        if settled.verdict is not Verdict.HELD:
            return dataclasses.replace(settled, why=f"{told.evidence}; {settled.why}")
        return dataclasses.replace(
            told, evidence=f"{told.evidence}; {said}", control=f"{told.control}; {settled.control}"
        )
    repair = "Draw with a temperature of about 1 and without top_k=1, so that the completions of a prompt differ."
    found = f"{said}: their rewards are equal whatever a function pays, so every advantage is 0"
    if max(len(ids) for group in training.drawn for ids in group) > 1 and training.small:
        return Finding("F10", found, repair, fault="draws")
    why = "a model may know the answers to so few prompts by heart, and one token says little"
    return Finding.not_checked("F10", f"{told.evidence}; {said}: {why}")


def _drawn_with_completions(training: Training, row: dict[str, Any]) -> list[str]:
    """Return what reward functions are handed for each completion and the dataset has not: a `rollout_func` made it."""
    handed = training.reward_inputs or {}
    count = len(handed.get("completions") or ())
    lists = (name for name, value in handed.items() if isinstance(value, (list, tuple)) and len(value) == count)
    return [name for name in lists if name not in OWN and name not in row]


def _is_own(training: Training, value: Any) -> bool:
    return inspect.isfunction(value) and training.own(value.__code__.co_filename)


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
    """Return a few rows, with each value of a column that is asked for, where they are few."""
    rows = prompted(training, _LOOKED_AT)
    chosen = rows[:: max(1, len(rows) // ROWS)][:ROWS]
    for name in sorted({name for function in functions for name in signature.asked_columns(function)}):
        kinds = {row[name]: row for row in reversed(rows) if isinstance(row.get(name), str)}
        if len(kinds) <= ROWS:
            chosen += [row for value, row in kinds.items() if all(value != other.get(name) for other in chosen)]
    return chosen


def _call_size(training: Training) -> dict[str, int]:
    """Return how many completions a group has, and how many of it one call holds, where that is a part of a group."""
    step = read_step(training)
    if step is None:
        return {}
    sizes = {"group": step.generations} if step.generations > 1 else {}
    each = (step.per_round or 0) // max(training.world_size, 1)
    return sizes | {"part": each} if 0 < each < step.generations else sizes


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
