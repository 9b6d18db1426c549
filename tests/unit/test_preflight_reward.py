"""Reward functions asked about made-up completions: what each can never reward, and silence for what is only odd."""

import asyncio
import random
import re
import types
from collections.abc import Sequence

import pytest

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

from failurelab.preflight.answers import Finding, Held, NotChecked  # noqa: E402
from failurelab.preflight.inputs import Seen  # noqa: E402
from failurelab.preflight.judges.patterns import forms  # noqa: E402
from failurelab.preflight.judges.reward import judge_rewards  # noqa: E402

PLAIN = {"prompt": ["3+4=", "5+6=", "8+9=", "12+30="], "answer": ["7", "11", "17", "42"]}
CHAT = PLAIN | {"prompt": [[{"role": "user", "content": text}] for text in PLAIN["prompt"]]}
WORDS = {"prompt": ["Capital of France?", "Of Italy?", "Of Spain?", "Of Peru?"]}
WORDS["answer"] = ["Paris", "Rome", "Madrid", "Lima"]
IN_ORDER = PLAIN["answer"] * 50
ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>")


def text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def exact(completions, answer, **_):
    return [float(text(completion) == right) for completion, right in zip(completions, answer)]


def tagged(prompts, completions, answer, **kwargs):
    found = [re.search(r"<reasoning>.*?</reasoning>\s*<result>(.*?)</result>", text(c), re.S) for c in completions]
    return [2.0 if match and match[1].strip() == right else 0.0 for match, right in zip(found, answer)]


def distance(completions, answer, **_):
    numbers = [re.findall(r"\d+", text(completion)) for completion in completions]
    return [-abs(int(n[-1]) - int(right)) if n else -100.0 for n, right in zip(numbers, answer)]


def shorter(completions, **_):
    return [-float(len(text(completion))) for completion in completions]


def noise(completions, **_):
    return [random.random() for _ in completions]


async def later(completions, answer, **_):
    await asyncio.sleep(0)
    return exact(completions, answer)


def unknown_form(completions, answer, **_):
    return [float(text(c).endswith(f"~~{right}~~") and len(text(c)) > 90) for c, right in zip(completions, answer)]


def ones(completions, **_):
    return [1.0 for _ in completions]


def counted(prompts, completions, **_):
    return [0.5] * len(completions)


def a_string(completions, **_):
    return [float(isinstance(completion, str)) for completion in completions]


def of_the_prompt(prompts, completions, **_):
    return [float(len(prompt)) for prompt in prompts]


def one_number(completions, answer, **_):
    return sum(exact(completions, answer)) / len(completions)


def one_in_a_list(completions, **_):
    return [float(any(text(completion) for completion in completions))]


def some(completions, **_):
    return [float(len(text(completion))) for completion in completions if text(completion)]


def nothing(completions, **_):
    for completion in completions:
        text(completion)


def unread_numbers(completions, answer, **_):
    matches = [ANSWER.search(text(completion)) for completion in completions]
    return [float(bool(match) and match[1] == right) for match, right in zip(matches, answer)]


def text_against_number(completions, answer, **_):
    return [float(text(completion).strip() == right) for completion, right in zip(completions, answer)]


def messages_as_text(completions, answer, **_):
    return [float(right in completion) for completion, right in zip(completions, answer)]


def messages_split(completions, answer, **_):
    return [float(completion.split()[-1:] == [right]) for completion, right in zip(completions, answer)]


def another_column(completions, solution, **_):
    return exact(completions, solution)


def another_key(completions, **kwargs):
    return exact(completions, kwargs["solution"])


def another_key_got(completions, **kwargs):
    wanted = kwargs.get("solution") or [None] * len(completions)
    return [float(text(completion) == str(right)) for completion, right in zip(completions, wanted)]


def no_kwargs(completions):
    return [float(len(completion)) for completion in completions]


def errors_paid(completions, answer, **_):
    return [float(text(completion) != right) for completion, right in zip(completions, answer)]


def first_word(completions, **_):
    return [float(text(completion).split()[0] == "The") for completion in completions]


def nan_for_no_number(completions, answer, **_):
    return [float("nan") if not re.search(r"\d", text(c)) else float(text(c) == r) for c, r in zip(completions, answer)]


def infinite(completions, **_):
    return [float("inf") if "answer" in text(completion) else 0.0 for completion in completions]


def all_none(completions, **_):
    return [None for completion in completions if text(completion) is not None]


def by_place(completions, answer, **_):
    return [float(text(completion) == right) for completion, right in zip(completions, IN_ORDER)]


class Column(Sequence):
    """As datasets gives one: no list."""

    def __len__(self):
        return len(IN_ORDER)

    def __getitem__(self, place):
        return IN_ORDER[place]


COLUMN = Column()


def by_place_in_a_column(completions, answer, **_):
    return [float(text(completion) == right) for completion, right in zip(completions, COLUMN)]


def known_answers(completions, answer, **_):
    return [exact([c], [a])[0] + 0.1 * (text(c) in IN_ORDER) for c, a in zip(completions, answer)]


def mean_of_all(completions, answer, **_):
    scores = exact(completions, answer)
    return [sum(scores) / len(scores)] * len(scores)


def no_service(completions, **_):
    raise ConnectionError("the judge does not answer")


def seen(functions, rows=PLAIN, **attributes):
    functions = functions if isinstance(functions, list) else [functions]
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    args = types.SimpleNamespace(remove_unused_columns=attributes.pop("remove_unused_columns", False))
    vars(trainer).update({"reward_funcs": functions, "reward_weights": None, "args": args, "state": None} | attributes)
    return Seen(trainer=trainer, asked={}, dataset=datasets.Dataset.from_dict(rows))


def judge(functions, rows=PLAIN, tokenizer=None, **attributes):
    return list(judge_rewards(seen(functions, rows, processing_class=tokenizer, **attributes)))


@pytest.mark.parametrize("rows", [PLAIN, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize("function", [exact, tagged, distance, shorter, noise, later, known_answers])
def test_healthy_functions_are_silent(function, rows, tokenizer):
    """Each in both forms of a dataset; the right answer gets more wherever the function asks for it."""
    answers = judge(function, rows, tokenizer)
    assert not [answer for answer in answers if isinstance(answer, Finding)]
    judged = function in (exact, tagged, distance, later, known_answers)  # the others ask for no reference
    assert {answer.failure for answer in answers if isinstance(answer, Held)} == ({"F10", "F14"} if judged else {"F10"})
    if judged:
        assert any("the right answer got" in answer.evidence for answer in answers if isinstance(answer, Held))


def test_a_constant_beside_a_function_that_varies_is_odd_and_no_more(tokenizer):
    answers = judge([exact, ones], tokenizer=tokenizer)
    assert not [answer for answer in answers if isinstance(answer, Finding)]
    assert any(isinstance(answer, NotChecked) and "ones gives 1 for all" in answer.why for answer in answers)


def test_a_form_that_nobody_thought_of_is_not_checked(tokenizer):
    """The function is right, and only a completion of a form of its own would show it: no failure."""
    (answer,) = judge(unknown_form, tokenizer=tokenizer)
    assert isinstance(answer, NotChecked) and "none may have its form" in answer.why


@pytest.mark.parametrize(
    ("function", "rows", "failure", "words"),
    [
        (ones, PLAIN, "F10", "never reads"),
        (counted, CHAT, "F10", "gives 0.5 for all"),
        (a_string, PLAIN, "F10", "never reads"),
        (of_the_prompt, PLAIN, "F10", "one number for each prompt"),
        (one_number, PLAIN, "F14", "one number for"),
        (one_in_a_list, PLAIN, "F14", "one number for"),
        (some, PLAIN, "F14", "rewards for"),
        (nothing, PLAIN, "F14", "NoneType"),
        (unread_numbers, WORDS, "F14", "'Paris'"),
        (text_against_number, PLAIN | {"answer": [7, 11, 17, 42]}, "F14", "answer is int '7'"),
        (messages_as_text, CHAT, "F14", "lists of messages"),
        (messages_split, CHAT, "F14", "lists of messages"),
        (another_column, PLAIN, "F14", "asks for solution"),
        (another_key, PLAIN, "F14", "'solution'"),
        (another_key_got, PLAIN, "F14", "'solution'"),
        (no_kwargs, PLAIN, "F14", "takes no"),
        (errors_paid, CHAT, "F14", "the wrong sign"),
        (first_word, PLAIN, "F14", "an empty completion"),
        (infinite, PLAIN, "F14", "inf"),
        (all_none, PLAIN, "F14", "None"),
        (by_place, PLAIN, "F14", "by the place in the batch"),
        (by_place_in_a_column, PLAIN, "F14", "by the place in the batch"),
        (mean_of_all, PLAIN, "F10", "for a whole batch"),
    ],
)
def test_what_a_function_can_never_reward(function, rows, failure, words, tokenizer):
    findings = [answer for answer in judge(function, rows, tokenizer) if isinstance(answer, Finding)]
    assert [finding.failure for finding in findings] == [failure]
    assert words in findings[0].evidence and findings[0].repair.endswith(".")


def test_a_negative_weight_is_the_wrong_sign_too(tokenizer):
    findings = [
        answer for answer in judge(exact, tokenizer=tokenizer, reward_weights=[-1.0]) if isinstance(answer, Finding)
    ]
    assert ["wrong sign" in finding.evidence for finding in findings] == [True]


def test_a_weight_of_zero_for_what_alone_is_right(tokenizer):
    """The other function's reward may rise all the same; a weight of 0 beside another that asks is odd and no more."""
    given = {"tokenizer": tokenizer, "reward_weights": [0.0, 1.0]}
    (finding,) = [answer for answer in judge([exact, shorter], **given) if isinstance(answer, Finding)]
    assert finding.failure == "F14" and "reward_weights is 0" in finding.evidence
    assert not [answer for answer in judge([exact, distance], **given) if isinstance(answer, Finding)]


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"temperature": 0.01}, "temperature is 0.01"),
        ({"top_k": 1, "temperature": 1.0}, "top_k is 1"),
        ({"generation_kwargs": {"do_sample": False}}, "do_sample is False"),
        ({"temperature": 0.3, "top_k": 50, "top_p": 0.9}, ""),
    ],
)
def test_completions_that_are_all_the_same(asked, what, tokenizer):
    """Without chance in the sampling no group has rewards that differ."""
    given = seen(exact, processing_class=tokenizer)
    given.asked.update(asked)
    findings = [answer for answer in judge_rewards(given) if isinstance(answer, Finding)]
    assert [finding.failure for finding in findings] == (["F10"] if what else [])
    assert not what or findings[0].evidence.startswith(what)


def test_columns_that_the_trainer_drops(tokenizer):
    (finding,) = judge(exact, tokenizer=tokenizer, remove_unused_columns=True)
    assert finding.failure == "F14" and "remove_unused_columns=False" in finding.repair


def test_nan_is_masked_by_the_releases_that_mask_it(tokenizer):
    """Releases 0.14 and 0.15 add it to the sum; later ones leave it out, as they do with None."""
    from failurelab.preflight.judges.rows import trl_source

    answers = judge(nan_for_no_number, tokenizer=tokenizer)
    masked = "nansum" in trl_source(trl.GRPOTrainer.__new__(trl.GRPOTrainer))
    assert any(isinstance(answer, Finding) for answer in answers) is not masked


def test_a_service_that_is_not_there_is_no_failure(tokenizer):
    (answer,) = judge(no_service, tokenizer=tokenizer)
    assert isinstance(answer, NotChecked) and "the judge does not answer" in answer.why


def test_each_function_is_called_once_where_once_is_enough(tokenizer):
    calls = []

    def paid(completions, answer, **_):
        calls.append(len(completions))
        return exact(completions, answer)

    judge(paid, tokenizer=tokenizer)
    assert len(calls) == 1


def test_forms_are_read_off_a_function():
    """Its patterns and tags say how it wants an answer, also through a function that it calls."""
    written = [form("42") for form in forms(tagged, "42")]
    assert any(re.fullmatch(r"<reasoning>.*</reasoning>.*<result>42</result>", each) for each in written)
    assert [form("42") for form in forms(unread_numbers, "42")] == ["<answer>42</answer>"]
    assert forms(unread_numbers, "Paris") == []  # it can match no word


def test_two_lambdas_of_one_line_are_not_taken_for_each_other(tokenizer):
    """Which of them a source line belongs to is unknown, so nothing is said of what they read."""
    pair = [lambda completions, **_: [1.0] * len(completions), lambda completions, **_: list(map(len, completions))]
    (answer,) = judge(pair[0], tokenizer=tokenizer)
    assert isinstance(answer, NotChecked)
    assert not [answer for answer in judge(pair[1], tokenizer=tokenizer) if isinstance(answer, Finding)]
