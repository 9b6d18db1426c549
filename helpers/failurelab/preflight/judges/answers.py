"""Prompts and answers that do not belong together: in another order, told by the prompt, or of one prompt alone.

No log shows it: rewards stay low where the answers are those of other rows, and rise at once where the prompt tells
them. What is right is known here of sums alone; an answer that the prompt gives away is found by the words around it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.rows import dataset_size, generates, prompted, sample
from failurelab.preflight.training import Training
from failurelab.rewards import forms, references, signature
from failurelab.rewards.references import is_conversation
from failurelab.rewards.table import quote

FAILURE = "rows"
_ROWS, _FEW, _MOST, _SHIFTS = 2048, 8, 0.9, (1, -1, 2, -2)
_SUM = re.compile(r"(?<![\w.*/^-])\d+(?:\s*[-+*]\s*\d+)+(?![\w.*/^(])")
_TOLD = r"(?:\b(?:answer|solution|ground.?truth|label)\W{{0,6}}|答案\W{{0,4}}|\d\s*=\s*){}(?![\w.,]*\w)"
_TOGETHER = "Take the prompt and its answer from the same row, and shuffle, filter or sort them together."


def judge_answers(training: Training) -> Iterator[Finding]:
    """Tell answers that are those of other rows, or stand in their prompts, and many answers to one prompt."""
    functions = getattr(training.trainer, "reward_funcs", None)
    functions = functions if isinstance(functions, list) else []
    asked = [name for function in functions for name in signature.asked_columns(function)]
    column = signature.reference_column(prompted(training, 1), asked) if generates(training.trainer) else None
    if column is None:
        return
    rows = _rows(training, column)
    answers = [next(iter(references.readings(row[column])), "") for row in rows]
    prompts, different = [row["prompt"] for row in rows], len(set(answers))
    if different > 1 and len({repr(prompt) for prompt in prompts}) == 1:
        said = f"all {len(rows)} rows that were read have the same prompt, {quote(forms.last_text(prompts[0]))}, and "
        why = "what the model is to answer to it was not looked at"
        repair = "Put each row's question into its prompt: an f-string, or format(...), in the function that maps it."
        yield Finding.suspected(FAILURE, f"{said}{different} different answers (column {column})", why, repair)
    elif different > 1:
        yield from _told(prompts, answers, column)
        yield from _misplaced(prompts, answers, column)


def _rows(training: Training, column: str) -> list[dict[str, Any]]:
    """Return prompts and answers, of a dataset the first ones in their order."""
    size, dataset = dataset_size(training), training.dataset
    if size is None:
        rows = sample(training, _ROWS)
    else:
        dataset = dataset.select_columns(["prompt", column]) if hasattr(dataset, "select_columns") else dataset
        rows = [dict(dataset[place]) for place in range(min(size, _ROWS))]
    return [row for row in rows if row.get("prompt") and column in row]


def _told(prompts: Sequence[Any], answers: Sequence[str], column: str) -> Iterator[Finding]:
    """Tell answers that stand in their own prompts, behind a word that says so or in the assistant's own message."""
    told = []
    for prompt, answer in zip(prompts, answers):
        last = prompt[-1] if is_conversation(prompt) else {}
        said = str(last.get("content")) if last.get("role") == "assistant" else ""
        text = "\n".join(str(each.get("content")) for each in prompt) if last else str(prompt)
        word = rf"(?<!\w){re.escape(answer)}(?!\w)"
        if answer and (re.search(word, said) or re.search(_TOLD.format(re.escape(answer)), text, re.IGNORECASE)):
            told.append((said or text, answer))
    if len(told) >= _MOST * len(prompts):
        text, answer = told[0]
        yield Finding.suspected(
            FAILURE,
            f"{len(told)} of {len(prompts)} prompts tell their own answer (column {column}), such as {quote(answer)} "
            f"in {quote(text, 100)}: the model has to copy it, or to say nothing more",
            "it was read in the texts alone",
            "Leave the answer, and the assistant's message with it, out of the prompt.",
            fault="told",
        )


def _misplaced(prompts: Sequence[Any], answers: Sequence[str], column: str) -> Iterator[Finding]:
    """Tell sums whose answers are those of other rows: the same numbers as the right ones, in another order."""
    right = [_value(forms.last_text(prompt)) for prompt in prompts]
    pairs = [(value, answer) for value, answer in zip(right, answers) if value is not None]
    same = sum(value == answer for value, answer in pairs)
    shared = sum((Counter(value for value, _ in pairs) & Counter(answer for _, answer in pairs)).values())
    if len(pairs) < max(_FEW, _MOST * len(prompts)) or 2 * same > len(pairs) or shared < _MOST * len(pairs):
        return
    place = next(n for n, (value, answer) in enumerate(zip(right, answers)) if value not in (None, answer))
    said = (
        f"the answers (column {column}) are those of other rows: {same} of {len(pairs)} are right, and "
        f"{quote(answers[place])} stands beside {quote(forms.last_text(prompts[place]))}. {shared} of them are the "
        "right ones of all rows in another order"
    )
    for shift in _SHIFTS:
        moved = list(zip(right, answers[shift:]) if shift > 0 else zip(right[-shift:], answers))
        fits = sum(value == answer for value, answer in moved)
        if fits >= _MOST * len(moved):
            rows = f"{abs(shift)} row{'s' * (abs(shift) > 1)} {'further down' if shift > 0 else 'further up'}"
            said += f": with the answer {rows}, {fits} of {len(moved)} are right"
            break
    yield Finding.suspected(FAILURE, said, "no edit was tried", _TOGETHER, fault="order")


def _value(text: str) -> str | None:
    """Return what the last sum of a text comes to; None where there is none."""
    sums = _SUM.findall(re.sub("[x×]", "*", text))
    if not sums:
        return None
    products = re.findall(r"([-+]?)\s*(\d+(?:\s*\*\s*\d+)*)", sums[-1])
    return str(
        sum((-1 if sign == "-" else 1) * math.prod(map(int, re.findall(r"\d+", each))) for sign, each in products)
    )
