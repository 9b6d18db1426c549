"""Reward functions asked about made-up completions: what each can never reward, and silence for what is only odd."""

import asyncio
import contextlib
import copy
import fractions
import json
import os
import pathlib
import random
import re
import tempfile
import time
import types
import unicodedata

import datasets
import pytest
import trl
from packaging.version import Version

from failurelab.preflight import repairs
from failurelab.preflight.answer import Verdict
from failurelab.preflight.judges import batch
from failurelab.preflight.judges.preferences import judge_preferences
from failurelab.preflight.judges.rewards import greedy_sampling, judge_rewards
from failurelab.preflight.judges.rows import installed_version
from failurelab.preflight.training import Training
from failurelab.rewards import asking, forms, patterns, references, signature, survey
from failurelab.rewards.inputs import Inputs

PLAIN = {"prompt": ["3+4=", "5+6=", "8+9=", "12+30="], "answer": ["7", "11", "17", "42"]}
CHAT = PLAIN | {"prompt": [[{"role": "user", "content": text}] for text in PLAIN["prompt"]]}
WORDS = {"prompt": ["Capital of France?", "Of Italy?", "Of Spain?", "Of Peru?"]}
WORDS["answer"] = ["Paris", "Rome", "Madrid", "Lima"]
KINDS = PLAIN | {"task": ["math", "coding", "math", "coding"]}
MASKED = installed_version("trl") >= Version("0.16")  # None and NaN are left out of the sum
ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>")
R1 = "Think first: <think> reasoning process here </think><answer> answer here </answer>"
XML = "Respond in this format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"


def told(system, rows=PLAIN):
    """Return rows whose prompts begin with a system's message."""
    prompts = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in PLAIN["prompt"]]
    return rows | {"prompt": prompts}


def answers_as(write):
    return CHAT | {"answer": [write(answer) for answer in PLAIN["answer"]]}


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


def miss(completions, answer, **_):
    """To be paid with a negative weight: nothing for a right answer, and 1 for no number at all."""
    pairs = zip(map(text, completions), answer)
    return [min(abs(int(said) - int(right)), 10) / 10 if said.isdecimal() else 1.0 for said, right in pairs]


def in_reasoning(completions, answer, **_):
    """To be paid with a negative weight: the answer stands in the reasoning already."""
    return [float(right in text(completion).split("</think>")[0]) for completion, right in zip(completions, answer)]


def without_tags(completions, **_):
    return [float("<answer>" not in text(completion)) for completion in completions]


def shorter(completions, **_):
    return [-float(len(text(completion))) for completion in completions]


def noisy(completions, answer, **_):
    return [reward + random.random() / 10 for reward in exact(completions, answer)]


async def later(completions, answer, **_):
    await asyncio.sleep(0)
    return exact(completions, answer)


class Scorer:
    """As many write them: an object that is called."""

    __name__ = "scorer"
    pattern = re.compile(r"<result>(.*?)</result>")

    def __call__(self, completions, answer, **_):
        found = [self.pattern.search(text(completion)) for completion in completions]
        return tuple(1.5 if match and match[1] == right else -1.5 for match, right in zip(found, answer))


def ranked(completions, answer, **_):
    """Group-relative, as trl's documents show: a rank among all completions of a batch."""
    given = exact(completions, answer)
    return [sum(other < each for other in given) / len(given) for each in given]


def one_line_wanted(completions, **_):
    return [float(bool(re.fullmatch(r"[^\n]{1,200}", text(c)))) for c in completions]


def penalty_for_answer_alone(completions, answer, **_):
    """Beside a function for right answers: an answer without a word of reasoning gets a little less."""
    return [-0.1 if text(c).strip() == right else 0.0 for c, right in zip(completions, answer)]


def of_result(completions, result, **_):
    return exact(completions, result)


def in_tag(completions, result, **_):
    return [float(f"<result>{right}</result>" in text(c)) for c, right in zip(completions, result)]


def of_level(completions, level, **_):
    return [len(text(c)) / 100 if each == "easy" else 0.0 for c, each in zip(completions, level)]


SOUND = [exact, tagged, distance, noisy, later, Scorer(), ranked]


def ones(completions, **_):
    return [1.0 for _ in completions]


def of_the_prompt(prompts, completions, **_):
    return [float(len(prompt)) for prompt in prompts]


def chance(completions, **_):
    return [random.random() for _ in completions]


def one_number(completions, answer, **_):
    return sum(exact(completions, answer)) / len(completions)


def mean_of_all(completions, answer, **_):
    scores = exact(completions, answer)
    return [sum(scores) / len(scores)] * len(scores)


REMEMBERED = {}


def remembered_by_prompt(prompts, completions, answer, **_):
    return [REMEMBERED.setdefault(p, exact([c], [a])[0]) for p, c, a in zip(prompts, completions, answer)]


def first_of_batch(completions, answer, **_):
    return [float(text(completion) == answer[0]) for completion in completions]


def some(completions, **_):
    return [float(len(text(completion))) for completion in completions if text(completion)]


def nothing(completions, **_):
    for completion in completions:
        text(completion)


def unread_numbers(completions, answer, **_):
    matches = [ANSWER.search(text(completion)) for completion in completions]
    return [float(bool(match) and match[1] == right) for match, right in zip(matches, answer)]


def stripped(completions, answer, **_):
    return [float(text(completion).strip() == right) for completion, right in zip(completions, answer)]


def stripped_and_short(completions, answer, **_):
    return [reward - 0.05 * len(text(c)) for reward, c in zip(stripped(completions, answer), completions)]


def as_long_as_the_answer(completions, answer, **_):
    return [-float(abs(len(text(completion)) - len(str(right)))) for completion, right in zip(completions, answer)]


def lower(completions, answer, **_):
    return [float(right in text(completion).lower()) for completion, right in zip(completions, answer)]


def last_number(completions, answer, **_):
    return [float(re.findall(r"-?\d+", text(c))[-1:] == [right]) for c, right in zip(completions, answer)]


def last_number_bare(completions, answer, **_):
    return last_number(completions, [re.findall(r"\d+", right)[0] for right in answer])


def messages_as_text(completions, answer, **_):
    return [float(right in completion) for completion, right in zip(completions, answer)]


def message_caught(completions, answer, **_):
    rewards = []
    for completion, right in zip(completions, answer):
        try:
            rewards.append(float(completion["content"] == right))
        except Exception:
            rewards.append(0.0)
    return rewards


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


def code_alone(completions, task, **_):
    return [float("def" in text(c)) if kind == "code" else None for c, kind in zip(completions, task)]


def coding_alone(completions, task, **_):
    return [float("def" in text(c)) if kind == "coding" else None for c, kind in zip(completions, task)]


def unknown_form(completions, answer, **_):
    return [float(text(c).endswith(f"~~{right}~~") and len(text(c)) > 90) for c, right in zip(completions, answer)]


def matches(pattern, flags=0, call=re.match):
    """Return a reward for a format, as people write them."""

    def format_reward(completions, **kwargs):
        return [1.0 if call(pattern, text(completion), flags) else 0.0 for completion in completions]

    return format_reward


def json_reward(key):
    def score(completions, answer, **_):
        rewards = []
        for completion, right in zip(completions, answer):
            try:
                rewards.append(1.0 if str(json.loads(text(completion))[key]) == right else -1.0)
            except (ValueError, KeyError, TypeError):
                rewards.append(-1.0)
        return rewards

    return score


def training(functions, rows=PLAIN, **attributes):
    functions = functions if isinstance(functions, list) else [functions]
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    args = types.SimpleNamespace(remove_unused_columns=attributes.pop("remove_unused_columns", False))
    given = {
        "environment_factories": None,
        "tools": None,
        "chat_template": None,
        "chat_template_kwargs": {},
        "_is_vlm": False,
    }
    given |= {"reward_funcs": functions, "reward_weights": None, "args": args, "state": None} | attributes
    vars(trainer).update(given)
    return Training(trainer=trainer, arguments={}, dataset=datasets.Dataset.from_dict(rows))


def judge(functions, rows=PLAIN, tokenizer=None, **attributes):
    return list(judge_rewards(training(functions, rows, processing_class=tokenizer, **attributes)))


def found(answers):
    return [answer for answer in answers if answer.verdict is Verdict.FOUND]


@pytest.mark.parametrize(
    ("function", "rows"), [(exact, PLAIN), *((function, CHAT) for function in SOUND)], ids=lambda value: str(value)[:20]
)
def test_functions_that_are_well_are_silent(function, rows, tokenizer):
    """Each in both forms of a dataset; the right answer gets more, and that is told with its figure."""
    answers = judge(function, rows, tokenizer)
    assert not found(answers) and not [answer for answer in answers if answer.verdict is Verdict.NOT_CHECKED]
    assert {answer.failure for answer in answers if answer.verdict is Verdict.HELD} == {"F10", "F14"}
    assert any(
        "the right answer (column answer) got" in answer.evidence
        for answer in answers
        if answer.verdict is Verdict.HELD
    )


@pytest.mark.parametrize(
    ("function", "low", "high"), [(shorter, "192 characters", "''"), (one_line_wanted, "''", "1 for")]
)
def test_a_reward_without_a_reference_shows_its_direction(function, low, high, tokenizer):
    """`abs(20 - len(completion))` pays for length (TRL #2771): nobody but its author knows whether that is wanted."""
    answers = judge(function, CHAT, tokenizer)
    (line,) = [answer.why for answer in answers if answer.verdict is Verdict.NOT_CHECKED]
    least, most = line.split("direction: ")[1].split(" characters), ", 1)
    assert not found(answers) and high in most and low in least + " characters)"


def of_each(pay):
    def function(completions, **_):
        return [float(pay(text(completion))) for completion in completions]

    return function


VALLEYS = [
    ("20 characters", lambda c: abs(20 - len(c))),
    ("50 characters", lambda c: (len(c.strip()) - 50) ** 2 / 100),
    ("1500 characters", lambda c: abs(1500 - len(c)) / 100),
    ("5 words", lambda c: abs(5 - len(c.split()))),
    ("2 sentences", lambda c: abs(2 - len([part for part in re.split(r"[.!?]+", c) if part.strip()]))),
    ("3 digits", lambda c: abs(3 - sum(map(str.isdigit, c)))),
]
NO_VALLEYS = [
    lambda c: -abs(20 - len(c)),
    lambda c: -len(c),
    lambda c: 0.0 if len(c) < 100 else (100 - len(c)) / 100,  # a penalty beyond what is wanted
    lambda c: random.random(),
    lambda c: len(c) % 7,
    lambda c: 10 < len(c) < 100,
    lambda c: not 10 < len(c) < 100,
    lambda c: abs(1 - c.count("<answer>")),  # of a pattern
    lambda c: len(set(c.split())) / max(1, len(c.split())),
]


@pytest.mark.parametrize(("place", "pay"), VALLEYS, ids=[place for place, _ in VALLEYS])
@pytest.mark.parametrize("rows", [{"prompt": PLAIN["prompt"]}, CHAT], ids=["no reference", "chat"])
def test_a_reward_that_is_least_at_one_length_may_lack_a_minus(place, pay, rows, tokenizer):
    """`abs(20 - len(completion))` pays for being far from what is wanted (TRL #2771)."""
    (flag,) = [answer for answer in judge(of_each(pay), rows, tokenizer) if answer.verdict is Verdict.SUSPECTED]
    assert flag.key == "F14:reward_funcs[0]:sign" and f"pays least at {place} (" in flag.evidence
    turned = judge(of_each(lambda c: -pay(c)), rows, tokenizer)
    assert not [answer for answer in turned if answer.accuses]


@pytest.mark.parametrize("pay", NO_VALLEYS)
def test_a_reward_of_another_shape_lacks_no_minus(pay, tokenizer):
    answers = judge(of_each(pay), {"prompt": PLAIN["prompt"]}, tokenizer)
    assert not [answer for answer in answers if answer.accuses]


@pytest.mark.parametrize(("weight", "count"), [(1.0, 1), (-1.0, 0)])
def test_a_valley_is_seen_with_its_weight_and_not_against_a_reference(weight, count, tokenizer):
    def of_the_answer(completions, answer, **_):
        return [float(abs(len(right) - len(text(c)))) for c, right in zip(completions, answer)]

    def accused(function):
        given = judge([function], PLAIN, tokenizer, reward_weights=[weight])
        return [answer for answer in given if answer.accuses]

    assert len(accused(of_each(VALLEYS[0][1]))) == count and not accused(of_the_answer)


@pytest.mark.parametrize(
    ("function", "best"),
    [(exact, "7"), (tagged, "<reasoning>"), (lambda completions, **_: [float(len(text(c))) for c in completions], "")],
    ids=["exact", "tagged", "length"],
)
def test_the_best_completion_is_an_answer(function, best, tokenizer):
    """F11 asks whether it fits: the longest text, which a reward of length likes best, answers nothing (TRL #2771)."""
    given = training(function, processing_class=tokenizer)
    list(judge_rewards(given))
    assert given.best.startswith(best) and bool(given.best) is bool(best)


@pytest.mark.parametrize(
    ("function", "column", "reference"),
    [(exact, "answer", "answer"), (of_result, "result", "result"), (in_tag, "result", ""), (of_level, "result", "")],
)
def test_the_reference_is_the_column_whose_text_alone_is_paid(function, column, reference, tokenizer):
    """Whatever it is called: F11 asks whether it fits. One that a completion must wrap, or no answer, is none."""
    rows = {"prompt": PLAIN["prompt"], column: PLAIN["answer"]}
    given = training(function, rows | {"level": ["easy"] * len(PLAIN["prompt"])}, processing_class=tokenizer)
    list(judge_rewards(given))
    assert given.reference == reference


@pytest.mark.parametrize(
    ("function", "rows", "failure", "words", "tried"),
    [
        (ones, PLAIN, "F10", "never reads", "lengths"),
        (of_the_prompt, PLAIN, "F10", "one number for each prompt", "lengths"),
        (chance, PLAIN, "F14", "never reads", ""),
        (one_number, PLAIN, "F10", "one number for", "one at a time"),
        (mean_of_all, PLAIN, "F10", "whole batch", "one at a time"),
        (remembered_by_prompt, PLAIN, "F10", "whole prompt", "one at a time"),
        (some, PLAIN, "F14", "rewards for", ""),
        (nothing, PLAIN, "F14", "NoneType", ""),
        (unread_numbers, WORDS, "F14", "'Paris'", "reference '7'"),
        (lower, WORDS, "F14", "'Paris'", "'paris'"),
        (stripped, PLAIN | {"answer": [7, 11, 17, 42]}, "F14", "answer is int '7'", "as text"),
        (stripped_and_short, PLAIN | {"answer": [7, 11, 17, 42]}, "F14", "answer is int '7'", "as text"),
        (last_number, answers_as("{} pages".format), "F14", "'7 pages'", "bare answer, '7'"),
        (messages_as_text, CHAT, "F14", "as plain text", "plain text the same"),
        (message_caught, CHAT, "F14", "as a message", "as a message"),
        (another_column, PLAIN, "F14", "asks for solution", "with answer under this name"),
        (another_key, PLAIN, "F14", "'solution'", "with answer under this name"),
        (another_key_got, PLAIN, "F14", "'solution'", "with answer under this name"),
        (no_kwargs, PLAIN, "F14", "takes no", "called without"),
        (errors_paid, CHAT, "F14", "the wrong sign", "with the sign turned"),
        (first_word, PLAIN, "F14", "an empty completion", "without those"),
        (infinite, PLAIN, "F14", "inf", ""),
        *([(code_alone, KINDS, "F14", "'code' is no value", "task='code'")] if MASKED else []),
        (json_reward("result"), told('JSON only: {"solution": <number>}'), "F14", "form that the prompts", '"result"'),
        (matches(r"(?!<think>|.*<answer>)"), told(R1), "F14", "the wrong sign", "sign turned"),
    ],
)  # fmt: skip
def test_what_a_function_can_never_reward(function, rows, failure, words, tried, tokenizer):
    (finding,) = found(judge(function, rows, tokenizer))
    assert finding.failure == failure and words in finding.evidence and finding.repair.endswith(".")
    assert tried in finding.tried and bool(finding.tried) is bool(tried)
    if "bare answer" in tried:  # the repair says it too, for an answer with --no-try has no other line for it
        assert tried in finding.repair.replace(":", ",")


@pytest.mark.parametrize(
    ("function", "rows", "kind"),
    [
        (no_kwargs, PLAIN, repairs.AnyKeywords),
        (matches(r"<think>.*?</think>\s*<answer>.*?</answer>", 0, re.fullmatch), CHAT, repairs.DotAll),
        (messages_as_text, CHAT, repairs.FirstLine),
        (another_key, PLAIN, repairs.Keyword),
        (infinite, PLAIN, type(None)),
    ],
)
def test_what_can_be_edited_has_an_undo(function, rows, kind, tokenizer):
    (finding,) = found(judge([function], rows, tokenizer))
    assert type(finding.undo) is kind


def raising(function, on):
    """Return the reward function with an error of its own for completions that `on` is true for."""

    def raises(completions, answer, **_):
        if any(on(text(completion), right) for completion, right in zip(completions, answer)):
            raise ValueError("not expected")
        return function(completions=completions, prompts=list(answer), answer=answer)

    return raises


@pytest.mark.parametrize(
    ("on", "words"),
    [
        (lambda said, right: not said, "an empty completion"),
        (lambda said, right: not said.isdecimal(), "'I do not know.'"),
        (lambda said, right: right is None, "answer='None'"),
    ],
)
@pytest.mark.parametrize(
    ("function", "failure"), [(mean_of_all, "F10"), (one_number, "F10"), (errors_paid, "F14"), (exact, "")]
)
def test_an_error_for_some_completions_hides_nothing_of_the_others(on, words, function, failure, tokenizer):
    """Each error has a line of its own, and what the function gives to the others is judged as if these were not."""
    rows = PLAIN | {"answer": ["7", "11", None, "42"] if "None" in words else PLAIN["answer"]}
    error, *others = found(judge(raising(function, on), rows, tokenizer))
    assert error.failure == "F14" and error.ends and words in error.evidence and "without those" in error.tried
    assert [finding.failure for finding in others] == [failure] * bool(failure)


def test_an_error_of_another_type_for_some_completions_is_the_functions_own(tokenizer):
    """A service that does not answer is asked in vain for every completion; this one fails for one of them alone."""

    def no_text(completions, answer, **_):
        if not all(map(text, completions)):
            raise RuntimeError("no text")
        return exact(completions, answer)

    (finding,) = found(judge(no_text, tokenizer=tokenizer))
    assert finding.ends and "no text" in finding.evidence


def test_a_service_that_is_asked_for_some_completions_alone_is_not_here(tokenizer):
    """What has no text gets 0 without a question: that is no error for the others of the function's own."""

    def asks_a_judge(completions, **_):
        return [no_service(completions) if text(completion) else 0.0 for completion in completions]

    answers = judge(asks_a_judge, tokenizer=tokenizer)
    assert not found(answers) and "could not be asked" in answers[0].why


def test_reward_functions_of_one_name_are_told_apart(tokenizer):
    """Two lambdas, or the same function twice: each answer says the place in reward_funcs, and so does its repair."""
    first, second = (
        (lambda completions, answer, **_: exact(completions, answer)),
        (lambda completions, answer, **_: errors_paid(completions, answer)),
    )
    (finding,) = found(judge([first, second], tokenizer=tokenizer, reward_weights=[1.0, 2.0]))
    assert finding.part == "reward_funcs[1]"
    (finding,) = found(judge([exact, exact], tokenizer=tokenizer, reward_weights=[1.0, -2.0]))
    assert finding.part == "reward_funcs[1]"
    assert finding.undo == repairs.Arguments({"reward_weights": [1.0, 2.0]})


OPENED = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>{{ '<think>\n' }}"


@pytest.mark.parametrize(
    ("rows", "template", "pattern", "flags", "told_by"),
    [
        # open-r1 #237
        (told(R1), None, r"^<think>.*?</think><answer>.*?</answer>$", 0, "format_reward"),
        (told(R1), None, r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.S, ""),
        # open-r1, n for a line break
        (told(XML), None, r"^<reasoning>\n.*?n</reasoning>\n<answer>\n.*?\n</answer>\s*$", re.S, "format_reward"),
        (told(XML), None, r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\s*$", re.S, ""),
        # TRL #6966: the prompt ends with the tag
        (CHAT, OPENED, r"^<think>.*?</think>", re.S, "'<think>\\n'"),
        (CHAT, OPENED, r"^(<think>)?.*?</think>", re.S, ""),
    ],
)
def test_a_format_that_no_completion_has(rows, template, pattern, flags, told_by, tokenizer):
    """Beside a function that is well, the one that is dead is named, by a completion in its own form and undone."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = template or own.chat_template
    findings = found(judge([matches(pattern, flags), last_number], rows, own))
    assert [finding.failure for finding in findings] == ["F14"] * bool(told_by)
    assert all(told_by in finding.evidence and finding.tried for finding in findings)


@pytest.mark.parametrize("special", [True, False])
def test_tags_that_the_trainer_leaves_out_where_it_decodes(special, tokenizer):
    """A tag that was added as a special token is in no completion; one that was added as a word is."""
    own = copy.deepcopy(tokenizer)
    own.add_tokens(["<answer>", "</answer>"], special_tokens=special)
    function = matches(r"<answer>.*?</answer>")
    findings = found(judge([function, last_number], told(R1), own))
    assert [finding.part for finding in findings] == ["reward_funcs[0]"] * special
    assert all("'</answer>' and '<answer>' are special tokens" in finding.evidence for finding in findings)


MARKED = "Work between <begin_work> and <finish_work>. Then give the number between <FINAL> and </FINAL>."
ONE_LINE = "Answer in one line like this: <note> why </note><out> number </out>"
IDEA = "Write\n<idea>\n...\n</idea>\n<result>\n...\n</result>\n"
EXAMPLE = "Think inside <think></think>, then the plain result: <think>\n1 and 1 are two\n</think>\n2"


def marked(end=""):
    """Return a reward for the number behind markers, two of which are no pair of tags."""
    pattern = re.compile(rf"<begin_work>.+?<finish_work>\s*<FINAL>(.+?)</FINAL>{end}", re.DOTALL)

    def read(completions, answer, **_):
        matches = [pattern.search(text(completion)) for completion in completions]
        return [float(bool(match) and match[1].strip() == right) for match, right in zip(matches, answer)]

    return read


def boxed(completions, answer, **_):
    return [float(re.findall(r"\\boxed\{(.*?)\}", text(c))[-1:] == [right]) for c, right in zip(completions, answer)]


@pytest.mark.parametrize(
    ("function", "system", "words"),
    [
        (marked(), MARKED, ""),  # a form with full marks has nothing that the prompt does not show
        (marked(), MARKED.replace("begin_work", "work"), "form that the prompts show"),
        (matches(r"^<note>.*?</note>\s*<out>.*?</out>$"), ONE_LINE, ""),
        (matches(r"^<note>.*?</note>\s*<out>.*?</out>$"), ONE_LINE.replace("in one line ", ""), "line break"),
        (matches(r"^<idea>\n.+?\n</idea>\n<result>\n.+?\n</result>\n$", re.S), IDEA, "follows the last tag"),
        (matches(r"^<idea>\n.+?\n</idea>\n<result>\n.+?\n</result>\s*$", re.S), IDEA, ""),
        # the same words, laid out otherwise than they are shown
        (matches(r"^<idea>.*?</idea><result>.*?</result>\s*$", re.S), IDEA, "form that the prompts show"),
        (boxed, EXAMPLE, "form that the prompts show"),
        (last_number, EXAMPLE, ""),
    ],
)
def test_a_form_that_the_prompt_shows_is_the_one_that_is_to_be_paid(function, system, words, tokenizer):
    findings = found(judge(function, told(system), tokenizer))
    assert [finding.failure for finding in findings] == ["F14"] * bool(words)
    assert all(words in finding.evidence and finding.tried for finding in findings)


def half(completions, **_):
    scores = []
    for completion in completions:
        text(completion)
        scores.append(0.5)
    return scores


def not_above(count):
    def penalty(completions, **_):
        return [-1.0 if len(text(completion)) > count else 0.0 for completion in completions]

    return penalty


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (half, Verdict.SUSPECTED),
        (not_above(1000), Verdict.SUSPECTED),
        (not_above(199), Verdict.NOT_CHECKED),  # the run's longest completion, with a token for each letter, has more
        (not_above(10**7), Verdict.NOT_CHECKED),
        (unknown_form, Verdict.NOT_CHECKED),
    ],
    ids=["constant", "a penalty beyond", "a penalty within", "a penalty far beyond", "unknown"],
)
def test_a_constant_is_told_from_a_form_that_nobody_thought_of(function, verdict, tokenizer):
    """One that no input decides on, and one that the run's longest completion does not reach, are constants."""
    given = training(function, processing_class=tokenizer)
    given.arguments["max_completion_length"] = 240
    (answer,) = judge_rewards(given)
    assert answer.verdict is verdict and (verdict is Verdict.NOT_CHECKED or answer.failure == "F10")
    beside = [answer for answer in judge([function, exact], tokenizer=tokenizer) if answer.verdict is not Verdict.HELD]
    assert [answer.verdict for answer in beside] == [Verdict.NOT_CHECKED]


def test_a_function_of_other_messages_is_no_reader_of_plain_text(tokenizer):
    """As plain text the empty completion alone raises nothing, and that one reward tells nothing apart."""

    def tool_use(completions, **_):
        return [0.1 * any(message["role"] == "tool" for message in each) for each in completions]

    (answer,) = judge(tool_use, CHAT, tokenizer)
    assert answer.verdict is Verdict.NOT_CHECKED


@pytest.mark.parametrize(("scale", "verdict"), [(1e-3, Verdict.NOT_CHECKED), (1.0, Verdict.FOUND)])
def test_chance_that_is_small_beside_the_sum_breaks_ties(scale, verdict, tokenizer):
    """People add it so that no group is flat; as large as the others it drowns them."""

    def noise(completions, **_):
        return [scale * random.random() for _ in completions]

    answers = [each for each in judge([noise, exact], tokenizer=tokenizer) if each.verdict is not Verdict.HELD]
    assert [answer.verdict for answer in answers if answer.part == "reward_funcs[0]"] == [verdict]


def by_prompt(completions, answer, **_):
    return [float(right) / 10 for _, right in zip([text(each) for each in completions], answer)]


def always_well(completions, **_):
    return [1.0 if text(completion) is not None else 0.0 for completion in completions]


@pytest.mark.parametrize(
    ("function", "words"), [(by_prompt, "depends on the prompt alone"), (always_well, "all get the most that it pays")]
)
def test_a_value_that_no_completion_decides_on_is_suspected(function, words, tokenizer):
    """It read the completions, so "none may have its form" was said of it, and nothing was found."""
    (answer,) = judge(function, CHAT, tokenizer)
    assert (answer.failure, answer.verdict) == ("F10", Verdict.SUSPECTED) and words in answer.evidence


def correctness(completions, **_):
    return [1.0 if text(completion).strip().isdigit() else 0.0 for completion in completions]


def format_of_answer(completions, **kwargs):
    return correctness(completions)


def correct_by_prompt(completions, prompts, **_):
    return correctness(completions)


def correct_by_others(completions, **kwargs):
    return correctness(completions, **kwargs)


@pytest.mark.parametrize("function", [correctness, format_of_answer, correct_by_prompt, correct_by_others])
def test_a_function_of_right_answers_that_reads_none_is_suspected(function, tokenizer):
    """By its name alone, so one of the form is not, nor one that may know the answer in another way."""
    suspected = [answer for answer in judge(function, CHAT, tokenizer) if answer.verdict is Verdict.SUSPECTED]
    assert ["no function reads answer" in answer.evidence for answer in suspected] == [True] * (function is correctness)
    beside = judge([function, exact], CHAT, tokenizer)
    assert not [answer for answer in beside if answer.verdict is Verdict.SUSPECTED]


def boxed_at_the_end(completions, answer, **_):
    found = [re.search(r"The final answer is: \$\\boxed\{(.+?)\}\$", text(completion)) for completion in completions]
    return [float(bool(match) and match[1] == right) for match, right in zip(found, answer)]


def test_a_form_whose_pieces_stand_in_the_prompt_is_shown(tokenizer):
    """A box was read there, and not what stands around it: a healthy script was named."""
    rows = told("Think. Finish with: The final answer is: $\\boxed{number}$.")
    answers = judge(boxed_at_the_end, rows, tokenizer)
    assert {answer.verdict for answer in answers} == {Verdict.HELD}
    assert [answer.failure for answer in found(judge(boxed_at_the_end, told("Use \\boxed{}."), tokenizer))] == ["F14"]


def talks(completions, answer, **_):
    """Rewards what is correct."""
    day = time.strftime("%d-%H")
    if os.getenv("DEBUG_MODE") == "true":
        with open(os.environ["LOG_PATH"], "a", encoding="utf-8") as file:
            file.write(f"----- {day} Accuracy reward -----")
    print("Question:", completions[0], "Extracted: ")
    if not completions:
        raise ValueError("no completions were given")
    return [float(f"<result>{right}</result>" in text(each)) for each, right in zip(completions, answer)]


def test_no_made_up_answer_shows_what_a_function_says_to_people():
    """`DEBUG_MODE` and `Question: 7` stood there as a model's answers."""
    assert set(signature.texts(talks)) <= {"content", "<result>", "</result>", "true"}
    shown = " ".join(each.text for each in forms.make([{"prompt": "3+4=", "answer": "7"}], "answer", [talks]))
    assert "<result>7</result>" in shown
    assert not re.search("DEBUG|utf-8|Question|Extracted|Accuracy|%d", shown)


@pytest.mark.parametrize(
    ("read", "write"),
    [(last_number_bare, write) for write in ("${}$", "\\boxed{{{}}}", "{} cm")] + [(last_number, "{}")],
)
def test_a_reference_that_is_read_bare_is_well(write, read, tokenizer):
    """The twins of those above: no form of a reference makes a function that strips it look dead."""
    answers = judge(read, answers_as(write.format), tokenizer)
    assert not found(answers) and any(answer.verdict is Verdict.HELD and answer.failure == "F14" for answer in answers)


@pytest.mark.parametrize("function", [ones, all_none, code_alone, unknown_form])
def test_a_dead_function_beside_others_is_named_and_nothing_held_of_it(function, tokenizer):
    """A constant adds nothing to any advantage: no failure by itself, and never a clause inside of what held."""
    answers = judge([last_number, function], KINDS, tokenizer)
    (told,) = [answer for answer in answers if answer.verdict in (Verdict.FOUND, Verdict.NOT_CHECKED)]
    words = told.evidence if told.verdict is Verdict.FOUND else told.why
    assert f"{function.__name__} gives" in words and "last_number" not in words and told.part
    gives_none = function in (all_none, code_alone)
    assert (told.verdict is Verdict.FOUND) is (gives_none if not MASKED else function is code_alone)
    assert not any(function.__name__ in answer.evidence for answer in answers if answer.verdict is Verdict.HELD)


@pytest.mark.parametrize("function", [nan_for_no_number, all_none, coding_alone])
def test_none_is_masked_by_the_releases_that_mask_it(function, tokenizer):
    """Releases 0.14 and 0.15 add NaN to the sum, and None is an error there; later ones leave both out."""
    assert bool(found(judge([function, last_number], KINDS, tokenizer))) is not MASKED


@pytest.mark.skipif(not MASKED, reason="None is an error in this release")
@pytest.mark.parametrize(("function", "dead"), [(code_alone, True), (coding_alone, False)])
def test_kinds_of_rows_that_alternate_are_all_seen(function, dead, tokenizer):
    """Every second row is of one kind: rows that are looked at in even steps would all be of the other."""
    findings = found(judge([last_number, function], {name: 48 * values for name, values in KINDS.items()}, tokenizer))
    assert [finding.failure for finding in findings] == ["F14"] * dead
    assert not dead or "'coding', 'math'" in findings[0].evidence


@pytest.mark.parametrize(
    ("functions", "weights", "failure", "words"),
    [
        ([exact, exact], [1.0, -1.0], "F10", "the sum is the same"),
        ([exact, distance], [0.0, 0.0], "F10", "the sum is the same"),
        ([exact], [-1.0], "F14", "times its weight -1 it has the wrong sign"),
        ([exact, shorter], [-1.0, 1.0], "", ""),  # nobody asked for right answers, as of a tutor who must not tell
        ([exact, penalty_for_answer_alone], None, "", ""),  # a penalty that others outweigh is no wrong sign
        ([unknown_form, penalty_for_answer_alone], None, "", ""),  # nobody knows what the other would give
        ([last_number, in_reasoning], [1.0, -1.0], "", ""),
        # The other function's reward may rise all the same; a weight of 0 beside another that asks is odd and no more.
        ([exact, shorter], [0.0, 1.0], "F14", "reward_weights is 0"),
        ([exact, distance], [0.0, 1.0], "", ""),
        ([last_number, without_tags], [1.0, 1.0], "F14", ""),
        ([last_number, without_tags], [1.0, -1.0], "", ""),  # a penalty need not see the form that the prompts show
    ],
)
def test_functions_and_their_weights(functions, weights, failure, words, tokenizer):
    rows = told(R1) if without_tags in functions else PLAIN
    findings = found(judge(functions, rows, tokenizer, reward_weights=weights))
    assert [finding.failure for finding in findings] == ([failure] if failure else [])
    assert all(words in finding.evidence for finding in findings)
    assert weights is None or 0.0 not in weights or not any(weights) or all(finding.tried for finding in findings)


@pytest.mark.parametrize(
    ("function", "clip", "verdict", "failure"),
    [
        (distance, (0.0, 1.0), Verdict.FOUND, "F10"),  # all rewards are below it, or its lower end
        (distance, [-200.0, 0.0], Verdict.HELD, "F10"),
        (distance, (-1000.0, -60.0), Verdict.SUSPECTED, "F14"),  # a right and a wrong number, and less for none
        (shorter, (-1000.0, -900.0), Verdict.SUSPECTED, "F10"),  # of which nobody knows what is right
        (exact, None, Verdict.HELD, "F10"),
        (exact, 10.0, Verdict.HELD, "F10"),  # of old releases, for normalized rewards
    ],
)
def test_a_range_to_which_rewards_are_clipped(function, clip, verdict, failure, tokenizer):
    given = training(function, processing_class=tokenizer)
    given.arguments["reward_clip_range"] = clip
    answers = [answer for answer in judge_rewards(given) if not answer.part]
    assert (verdict, failure) in [(answer.verdict, answer.failure) for answer in answers]
    accused = [answer for answer in answers if answer.verdict in (Verdict.FOUND, Verdict.SUSPECTED)]
    assert len(accused) == (verdict is not Verdict.HELD)
    assert all(answer.tried and answer.undo for answer in found(accused))


def above_the_mean(completions, answer, **_):
    """Pay the best of a call 1, and the mean 0."""
    paid = distance(completions, answer)
    return [value - sum(paid) / len(paid) for value in paid]


@pytest.mark.parametrize(
    ("function", "device", "verdict"),
    [
        (ranked, 1, Verdict.FOUND),
        (above_the_mean, 1, Verdict.FOUND),
        (above_the_mean, 2, Verdict.SUSPECTED),  # they differ, and pairs are compared instead of groups
        (above_the_mean, 4, None),  # a whole group
        (exact, 1, None),
        (distance, 1, None),
        (noisy, 1, None),
    ],
)
def test_completions_that_are_compared_in_a_part_of_their_group(function, device, verdict, tokenizer, monkeypatch):
    monkeypatch.setattr(batch.cuts, "counts_prompts", lambda: False)
    given = training(function, processing_class=tokenizer)
    given.arguments.update(num_generations=4, per_device_train_batch_size=device, steps_per_generation=1)
    given.world_size = 4
    answers = list(judge_rewards(given))
    told = [answer for answer in answers if answer.verdict in (Verdict.FOUND, Verdict.SUSPECTED)]
    assert [(answer.failure, answer.verdict) for answer in told] == ([("F14", verdict)] if verdict else [])
    held = [answer.failure for answer in answers if answer.verdict is Verdict.HELD]
    assert ("F10" in held) is (verdict is None)
    size = "per_device_train_batch_size"
    undo = repairs.Arguments({size: 4}, {size: "num_generations"})
    assert all(answer.tried and answer.undo == undo for answer in found(told))


@pytest.mark.parametrize(
    ("functions", "weight", "verdict"),
    [
        ([exact, distance], -0.1, Verdict.FOUND),  # a completion without a number gets 10
        ([exact, distance], -0.001, Verdict.NOT_CHECKED),  # a right answer is still the best
        ([exact, distance], 0.1, Verdict.HELD),
        ([exact, miss], -1.0, Verdict.HELD),
        ([exact, miss], 1.0, Verdict.FOUND),
        ([last_number, in_reasoning], -0.5, Verdict.NOT_CHECKED),
    ],
)
def test_a_negative_weight_takes_from_right_answers_or_from_wrong_ones(functions, weight, verdict, tokenizer):
    """Lab 32: what is below 0 already, and is turned by its weight once more, pays for being far off."""
    answers = judge(functions, tokenizer=tokenizer, reward_weights=[1.0, weight])
    (answer,) = [
        each
        for each in answers
        if each.failure == "F14" and (verdict is Verdict.HELD or each.verdict is not Verdict.HELD)
    ]
    assert answer.verdict is verdict
    if verdict is Verdict.FOUND:
        assert answer.part == "reward_funcs[1]" and "takes the lead of right answers" in answer.evidence
        assert answer.undo == (repairs.Arguments({"reward_weights": [1.0, -weight]}) if weight < 0 else None)
    elif verdict is Verdict.NOT_CHECKED:
        assert answer.why.endswith(f"its weight is {weight:g}: a penalty?")


@pytest.mark.parametrize(("weight", "held"), [(1.0, False), (0.001, True)])
def test_nothing_is_held_where_an_empty_completion_gets_as_much(weight, held, tokenizer):
    """Beside a reward for short completions that outweighs it a right answer is told from a wrong one, and no more."""
    answers = judge([exact, shorter], tokenizer=tokenizer, reward_weights=[1.0, weight])
    whole = [answer for answer in answers if answer.failure == "F14" and not answer.part]
    assert [answer.verdict for answer in whole] == [Verdict.HELD if held else Verdict.NOT_CHECKED] and not found(
        answers
    )
    assert held or "answers nothing no less" in whole[0].why


def in_each_other(completions, answer, **_):
    """An empty text is in every answer."""
    return [float(text(each).strip() in right or right in text(each)) for each, right in zip(completions, answer)]


def test_a_function_that_pays_an_empty_answer_like_the_right_one_is_suspected(tokenizer):
    """By itself, and not by another function beside it, as a penalty for length is."""
    suspected = [answer for answer in judge(in_each_other, tokenizer=tokenizer) if answer.verdict is Verdict.SUSPECTED]
    assert [answer.failure for answer in suspected] == ["F14"] and "answers nothing no less" in suspected[0].evidence


def test_a_number_is_not_what_every_function_that_is_blind_for_right_answers_needs(tokenizer):
    """A reward for the reference's length gives right and wrong answers the same, whatever their type is."""
    for function, answers in ((as_long_as_the_answer, [7, 11, 17, 42]), (stripped_and_short, PLAIN["answer"])):
        assert not found(judge(function, PLAIN | {"answer": answers}, tokenizer))


@pytest.mark.parametrize(
    ("arguments", "suspected"),
    [
        ({"repetition_penalty": 1.0}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"repetition_penalty": 2.0}, True),
        ({"repetition_penalty": None}, False),
        ({"repetition_penalty": 1.0, "generation_kwargs": {"repetition_penalty": 3}}, True),
    ],
)
def test_a_penalty_that_decides_what_is_drawn(arguments, suspected, tokenizer):
    own = training(exact, processing_class=tokenizer)
    own.arguments |= arguments
    assert [finding.part for finding in greedy_sampling(own)] == ["repetition_penalty"] * suspected


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
    given = training(exact, processing_class=tokenizer)
    given.arguments.update(asked)
    findings = found(judge_rewards(given))
    assert [finding.failure for finding in findings] == (["F10"] if what else [])
    assert not what or findings[0].evidence.startswith(what)


def test_columns_that_the_trainer_drops(tokenizer):
    (finding,) = found(judge(exact, tokenizer=tokenizer, remove_unused_columns=True))
    assert finding.failure == "F14" and "remove_unused_columns=False" in finding.repair and finding.ends


def test_what_the_trainer_handed_over_is_what_a_function_is_asked_with(tokenizer):
    """The run's own call says which columns and objects arrive; its completions are asked about too."""

    def by_ids(completions, completion_ids, trainer_state, **_):
        return [float(len(ids)) for ids in completion_ids]

    given = training(by_ids, processing_class=tokenizer)
    given.reward_inputs = {"prompts": [], "completions": ["~~~"], "completion_ids": [[5]], "trainer_state": None}
    answers = list(judge_rewards(given))
    assert not found(answers) and any(answer.verdict is Verdict.HELD and answer.failure == "F10" for answer in answers)
    given.reward_inputs = {"prompts": [], "completions": []}
    (finding,) = found(judge_rewards(given))
    assert "asks for completion_ids, trainer_state" in finding.evidence and finding.ends


# What is not here, and what goes wrong while a function is asked.


def no_service(completions, **_):
    raise ConnectionError("the judge does not answer")


def no_package(completions, **_):
    import a_package_that_nobody_has

    return a_package_that_nobody_has.score(completions)


def no_key(completions, **_):
    return [len(os.environ["KEY_OF_A_JUDGE_THAT_IS_NOT_HERE"])] * len(completions)


def no_file(completions, **_):
    return [float(line) for line in open("scores_that_are_not_there.txt")]


def exits(completions, **_):
    raise SystemExit(3)


def dies(completions, **_):
    os._exit(3)


def never_returns(completions, **_):
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


def other_process(completions, **_):
    from failurelab.preflight.stage.processes import Stopped

    raise Stopped("starts another process, python score.py")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_service, "the judge does not answer"),
        (no_package, "needs a_package_that_nobody_has"),
        (no_key, "needs the environment variable KEY_OF"),
        (no_file, "scores_that_are_not_there.txt"),
        (exits, "SystemExit: 3"),
        (dies, "ended its process (3)"),
        (never_returns, "did not return within 1 seconds"),
        (other_process, "starts another process"),
    ],
)
def test_what_is_not_here_is_no_failure(function, words, tokenizer, monkeypatch):
    if function is never_returns:
        monkeypatch.setattr(asking, "LIMIT", 1.0)
    given = training([last_number, function], CHAT, processing_class=tokenizer)
    answers = list(judge_rewards(given))
    (answer,) = [answer for answer in answers if answer.verdict is Verdict.NOT_CHECKED]
    assert answer.failure == "F14" and words in answer.why and function.__name__ in answer.why and not found(answers)


def test_what_a_function_starts_prints_and_writes_is_gone(tokenizer, monkeypatch, tmp_path, capfd, gone):
    """A log beside the script, a process that goes on, words on the terminal: it is judged, and nothing is left."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    left = tmp_path / "temporary" / "left"
    left.mkdir()

    def busy(completions, answer, **_):
        print("scoring")
        with open("rewards.log", "a") as log:
            log.write("scored")
        child = os.fork()
        if not child:
            (left / str(os.getpid())).touch()
            while True:
                time.sleep(60)
        while not (left / str(child)).exists():
            time.sleep(0.01)
        return last_number(completions, answer)

    answers = judge(busy, CHAT, tokenizer)
    assert any(answer.verdict is Verdict.HELD and answer.failure == "F14" for answer in answers)
    assert "scoring" not in "".join(capfd.readouterr()) and not (tmp_path / "rewards.log").exists()
    children = [int(path.name) for path in left.iterdir()]
    assert children and gone(children) == []


def _spread(completions, answer, **_):
    raw = exact(completions, answer)
    mean = sum(raw) / len(raw)
    return mean, (sum((value - mean) ** 2 for value in raw) / len(raw)) ** 0.5, raw


def scaled(completions, answer, **_):
    mean, spread, raw = _spread(completions, answer)
    return [(value - mean) / spread if spread else float("nan") for value in raw]


def scaled_or_ended(completions, answer, **_):
    mean, spread, raw = _spread(completions, answer)
    return [(value - mean) / spread for value in raw]


def scaled_well(completions, answer, **_):
    mean, spread, raw = _spread(completions, answer)
    return [(value - mean) / (spread + 1e-4) for value in raw]


def near(size, pattern=r"-?\d+(?:\.\d+)?"):
    """Return a reward for a number that is close to the reference, by a measure of the difference."""

    def close(completions, answer, **_):
        numbers = [re.findall(pattern, text(completion)) for completion in completions]
        return [float(bool(n) and size(float(n[-1]), float(right)) < 0.5) for n, right in zip(numbers, answer)]

    return close


NUMBERS = PLAIN | {"answer": ["7", "11", "17", "-42"]}


@pytest.mark.parametrize(
    ("function", "rows", "fault"),
    [
        (near(lambda said, right: abs(said - right)), PLAIN, ""),
        (near(lambda said, right: abs(said - right) / right), PLAIN, ""),
        (near(lambda said, right: said - right), PLAIN, "one side"),
        (near(lambda said, right: right - said), CHAT, "one side"),
        (near(lambda said, right: abs(said - right)), NUMBERS, ""),
        (near(lambda said, right: abs(said - right), r"\d+"), NUMBERS, "number"),
        (near(lambda said, right: abs(said - right), r"\d+"), PLAIN | {"answer": ["7", "1.5", "17", "2.25"]}, "number"),
        (near(lambda said, right: abs(said - right)), PLAIN | {"answer": ["7", "1.5", "17", "2.25"]}, ""),
    ],
)
def test_numbers_that_a_function_compares_on_one_side_or_reads_in_part(function, rows, fault, tokenizer):
    told = [answer.fault for answer in judge(function, rows, tokenizer) if answer.accuses]
    assert told == [fault] * bool(fault)


ALL = [str(a + b) for a in range(20) for b in range(20)]  # the answers to a dataset's rows, in its order
SET = datasets.Dataset.from_dict({"answer": ALL})
BY_PROMPT = dict(zip(PLAIN["prompt"], PLAIN["answer"]))


def by_place(completions, answer, **_):
    return [float(text(completion).strip() == right) for completion, right in zip(completions, ALL)]


def by_row(completions, **_):
    return [float(f"<answer>{SET[place]['answer']}</answer>" in text(each)) for place, each in enumerate(completions)]


def by_key(completions, prompts, **_):
    return [float(text(each) == BY_PROMPT[prompt]) for prompt, each in zip(prompts, completions)]


def by_words(completions, answer, **_):
    return [float(text(each) == right) + 0.1 * (text(each) in ALL[:8]) for each, right in zip(completions, answer)]


@pytest.mark.parametrize(
    ("function", "rows", "fault"),
    [
        (by_place, PLAIN, "own list"),
        (by_place, CHAT, "own list"),
        (by_row, told(R1), "own list"),
        (by_key, PLAIN, ""),
        (by_words, PLAIN, ""),
    ],
)
def test_a_list_of_its_own_is_no_column(function, rows, fault, tokenizer):
    """A call holds some rows of the dataset, each several times, so its places are not those of the list."""
    told = [(answer.failure, answer.fault) for answer in judge(function, rows, tokenizer) if answer.accuses]
    assert told == [("F14", fault)] * bool(fault)


def judged(pattern):
    """Return a reward that reads what a model says of a completion; here a text of its own stands for the model."""

    def read(completions, answer, **_):
        replies = [f"Rating: {9 if text(c).strip() == right else 2}/9" for c, right in zip(completions, answer)]
        found = [re.search(pattern, reply) for reply in replies]
        return [float(match[1]) if match else 0.5 for match in found]

    return read


@pytest.mark.parametrize(("function", "fault"), [(judged(r"Score: (\d)"), "reply"), (judged(r"Rating: (\d)"), "")])
def test_a_reply_that_is_never_read(function, fault, tokenizer):
    told = [(answer.failure, answer.fault) for answer in judge(function, CHAT, tokenizer) if answer.accuses]
    assert told == [("F10", fault)] * bool(fault)


def hides(read, errors=Exception):
    """Return a reward whose own except hides what `read` raises, and pays 0 then."""

    def reward(completions, answer, **columns):
        paid = []
        for place, (completion, right) in enumerate(zip(map(text, completions), answer)):
            try:
                value = read(completion, right, {name: its[place] for name, its in columns.items() if its})
            except errors:
                value = 0.0
            paid.append(value)
        return paid

    return reward


def no_copy(said, right, row):
    return -1.0 if said in row["question"] else float(said == right)


def undefined(said, right, row):
    return float(said == normalized(right))  # noqa: F821


def misfitting(said, right, row):
    return exact([said], answer=[right], strict=True, tolerance=0)[0] + miss([said])[0]


def in_json(said, right, row):
    return float(json.loads(said)["unheard_of"] == right)


def in_a_box(said, right, row):
    return float(re.search(r"~~~(.+)~~~", said).group(1) == right)


def as_whole_number(said, right, row):
    return float(int(said.removeprefix("!?")) == 10**6)


def messages_tried_first(completions, **_):
    said = []
    for each in completions:
        try:
            said.append(each[0]["content"])
        except Exception:
            said.append(each)
    return [float("~~" in each) for each in said]


def optional(said, right, row):
    try:
        strip = STRIP_FIRST
    except NameError:
        strip = False
    return float("~~" in (said.strip() if strip else said))


def of_a_table(said, right, row):
    return {"unheard_of": 1.0}[re.sub(r"\W", "_", said)]


def executed(together):
    """Return a reward that executes a completion, and then looks into what it has defined."""

    def run(said, right, row):
        space = {}
        exec(said, space if together else {})
        exec("assert value", space)
        return float(space["value"] == 8)

    return run


CODE = PLAIN | {"answer": [f"value = {answer}" for answer in (7, 8, 9, 10)]}


@pytest.mark.parametrize(
    ("function", "rows", "fault", "words"),
    [
        (hides(no_copy), CHAT, "column", "KeyError: 'question'"),
        (hides(no_copy, KeyError), PLAIN, "column", "KeyError: 'question'"),
        (hides(undefined), PLAIN, "swallowed", "name 'normalized' is not defined"),
        (hides(misfitting), PLAIN, "swallowed", "missing 1 required positional argument"),
        (hides(executed(False)), CODE, "swallowed", "name 'value' is not defined"),
        (hides(no_copy), PLAIN | {"question": PLAIN["prompt"]}, "", ""),
        (hides(in_json), PLAIN, "", ""),
        (hides(in_a_box), CHAT, "", ""),
        (hides(as_whole_number), PLAIN, "", ""),
        (hides(optional), PLAIN, "", ""),
        (hides(of_a_table), WORDS, "", ""),
        (messages_tried_first, PLAIN, "", ""),
        (hides(executed(True)), CODE, "", ""),
    ],
)
def test_an_error_that_a_function_hides_itself(function, rows, fault, words, tokenizer):
    """What no completion can help is told; a text that cannot be read is none of it."""
    accused = [answer for answer in judge(function, rows, tokenizer) if answer.accuses]
    assert [(answer.failure, answer.fault) for answer in accused] == [("F14", fault)] * bool(fault)
    assert all(words in answer.evidence for answer in accused)


def test_a_package_that_a_function_misses_and_hides_is_not_here(tokenizer):
    def verified(said, right, row):
        import a_package_for_mathematics

        return a_package_for_mathematics.verify(said, right)

    answers = judge(hides(verified), PLAIN, tokenizer)
    assert [answer.verdict for answer in answers] == [Verdict.NOT_CHECKED]
    assert "a_package_for_mathematics, which is not installed here" in answers[0].why


def the_draft(completions, draft, answer, **_):
    return [5.0 if text == right else -1.0 for text, right in zip(draft, answer)]


def hardness(completions, draft, **_):
    return [0.0 for text in draft]


def no_message(completions, **_):
    return [2.0 if isinstance(completion, list) else 0.0 for completion in completions]


def of_64_letters(completions, **_):
    return [-1.0 if len(text(completion)) > 64 else 0.0 for completion in completions]


def paid_for_length(completions, **_):
    return [1.0 if len(text(completion)) > 64 else 0.0 for completion in completions]


DRAFTS = CHAT | {"draft": ["7", "12", "17", "40"]}


@pytest.mark.parametrize(
    ("functions", "limit", "parts"),
    [
        ([the_draft, no_message, of_64_letters], 8, ["reward_funcs[0]", ""]),
        ([the_draft, exact], 8, ["reward_funcs[0]"]),
        ([no_message, of_64_letters], 8, [""]),
        ([hardness, exact], 8, []),
        ([exact, of_64_letters], 8, []),
        ([no_message, of_64_letters], 128, []),
        ([tagged, of_64_letters], 8, []),  # what it pays needs more room
        ([unknown_form, of_64_letters], 8, []),
        ([paid_for_length], 8, []),
    ],
)
def test_what_is_left_of_the_sum_within_the_length_that_is_drawn(functions, limit, parts, tokenizer):
    given = training(functions, DRAFTS, processing_class=tokenizer)
    given.arguments["max_completion_length"] = limit
    accused = [answer for answer in judge_rewards(given) if answer.accuses]
    assert [(answer.failure, answer.part) for answer in accused] == [("F10", part) for part in parts]


def in_both(prompts, completions, answer, **_):
    said = ["".join(m["content"] for m in prompt) + text(c) for prompt, c in zip(prompts, completions)]
    found = [re.search(r"<answer>(.*?)</answer>", both) for both in said]
    return [float(bool(match) and match[1].strip() == right) for match, right in zip(found, answer)]


def ended(completions, **_):
    return [float(text(completion).endswith("<|im_end|>")) for completion in completions]


def paid_for_wrong(completions, answer, **_):
    """Right answers get less, and a longer one gets less than a short one in both."""
    pairs = zip(map(text, completions), answer)
    return [(-1.0 if said.strip().endswith(right) else 1.0) - len(said) / 1e3 for said, right in pairs]


def as_text(completions, answer, **_):
    return [float(text(completion).strip() == str(right)) for completion, right in zip(completions, answer)]


def as_number(completions, answer, **_):
    pairs = zip(map(text, completions), answer)
    return [float(said.strip().replace(".", "").isdigit() and float(said) == right) for said, right in pairs]


FLOATS = CHAT | {"answer": [7.0, 11.0, 17.0, 42.0]}


@pytest.mark.parametrize(
    ("functions", "rows", "fault", "words"),
    [
        ([in_both], told("Write <answer>it</answer>."), "form", "stands in the prompt"),
        ([exact, ended], CHAT, "form", "'<|im_end|>', a special token"),
        ([paid_for_wrong], CHAT, "sign", "the wrong sign"),
        ([as_text], FLOATS, "float", "is a float"),
        ([as_number], FLOATS, "", ""),
    ],
)
def test_what_leaves_a_right_answer_unpaid(functions, rows, fault, words, tokenizer):
    accused = [answer for answer in judge(functions, rows, tokenizer) if answer.accuses]
    assert [answer.fault for answer in accused] == [fault] * bool(fault)
    assert all(words in answer.evidence for answer in accused)


def cutting(completions, answer, **_):
    """Pay the first digit, and leave nothing else to whoever comes after."""
    for completion in completions:
        completion[0]["content"] = completion[0]["content"][:1]
    return [float(text(completion) == right[:1]) for completion, right in zip(completions, answer)]


def using_up(completions, answer, **_):
    return [float(text(completion) == answer.pop(0)) for completion in completions]


def cutting_copies(completions, answer, **kwargs):
    return cutting([[dict(completion[0])] for completion in completions], answer)


@pytest.mark.parametrize(
    ("functions", "part"),
    [
        ([cutting, exact], "reward_funcs[0]"),
        ([exact, using_up, exact], "reward_funcs[1]"),
        ([exact, cutting], ""),
        ([cutting_copies, exact], ""),
    ],
)
def test_what_a_function_leaves_to_those_after_it(functions, part, tokenizer):
    """All of them are handed the same lists, one after another."""
    told = [answer.part for answer in judge(functions, CHAT, tokenizer) if answer.fault == "in place"]
    assert told == [part] * bool(part)


def remembering(kept):
    """Return a reward that is paid for what was not answered before."""

    def new(completions, answer, **_):
        paid = [float(text(c) == right and text(c) not in kept) for c, right in zip(completions, answer)]
        kept.update(map(text, completions))
        return paid

    return new


def counting(completions, answer, calls=[0], **_):  # noqa: B006
    """A bonus that grows from call to call: which answers are right, it goes on telling."""
    calls[0] += 1
    return [value * calls[0] for value in exact(completions, answer)]


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (scaled, "" if MASKED else "no number"),
        (scaled_or_ended, "no number"),
        (scaled_well, ""),
        (remembering(set()), "memory"),
        (counting, ""),
    ],
)
def test_what_a_function_makes_of_a_whole_call(function, fault, tokenizer):
    """A call whose completions are all the same comes early in a run, and a second call in any."""
    told = [answer.fault for answer in judge(function, tokenizer=tokenizer) if answer.accuses]
    assert told == [fault] * bool(fault)


def test_a_function_that_is_well_is_called_in_five_processes(tokenizer):
    """Once, once more twice, for what it keeps from call to call, of one text, of numbers, and of asides."""
    calls = pathlib.Path(tempfile.mkdtemp()) / "calls"

    def paid(completions, answer, **_):
        with calls.open("a") as file:
            file.write("1")
        return exact(completions, answer)

    judge(paid, tokenizer=tokenizer)
    assert calls.read_text() == "111111"


def last_block(completions, answer, **_):
    """As people read code: what stands in the last fenced block, without its language."""
    parts = [text(completion).split("```") for completion in completions]
    return [float(len(each) > 2 and each[-2].partition("\n")[2].strip() == a) for each, a in zip(parts, answer)]


def sql_block(completions, answer, **_):
    """As people read a query: one language is demanded, and no pattern says where the block ends."""
    bodies = [text(completion).partition("```sql\n")[2].partition("```")[0].strip() for completion in completions]
    return [float(body == right) for body, right in zip(bodies, answer)]


@pytest.mark.parametrize(
    ("function", "block"),
    [(last_block, "```\n7\n```"), (last_block, "```python\n7\n```"), (sql_block, "```sql\n7\n```")],
)
def test_an_answer_in_a_fenced_block_is_read(function, block, tokenizer):
    """No completion had one: of a function that reads it nothing was judged."""
    answers = judge(function, CHAT, tokenizer)
    assert {(answer.failure, answer.verdict) for answer in answers} == {("F10", Verdict.HELD), ("F14", Verdict.HELD)}
    paid = {(line.worth, line.text): line.rewards for line in survey.ask(function, prompt="3+4=", answer="7").lines}
    assert paid["right", block] == [1.0]
    assert paid["wrong", block.replace("7", references.other_answer("7"))] == [0.0]


QUERY = "Think first. Then write your query:\n```sql\n-- your query here\n```"


def in_plain_text(completions, answer, **_):
    return [0.0 if "```sql" in text(each) else float(right in text(each)) for each, right in zip(completions, answer)]


@pytest.mark.parametrize(
    ("function", "system", "words"),
    [
        (sql_block, QUERY, ""),
        (last_block, QUERY, ""),
        (boxed, QUERY, "form that the prompts show"),
        (boxed, "Box the answer. Given is this code:\n```python\nprint(3)\n```", ""),  # a question's block
        (in_plain_text, "Write one sql query, in plain text.", ""),
    ],
)
def test_a_fenced_block_is_shown_where_the_prompt_leaves_a_place_in_it(function, system, words, tokenizer):
    """A function that wants no block was named for the word `sql`, which stood in its prompt."""
    findings = found(judge(function, told(system), tokenizer))
    assert [words in finding.evidence for finding in findings] == [True] * bool(words)


def test_forms_are_read_off_a_function():
    """Its patterns and tags say how it wants an answer, also through a function that it calls, and without groups."""

    def written(function, answer="42", reasoning="I add."):
        own = patterns.own_forms(signature.texts(function), signature.reads_json(function), answer)
        return [patterns.fill(form, answer, reasoning) for form in own]

    assert "<reasoning>I add.</reasoning><result>42</result>" in written(tagged)
    assert written(unread_numbers) == ["<answer>42</answer>"]
    assert written(unread_numbers, "Paris") == []  # it can match no word
    assert "<t>a\nb</t>\n<a>42</a>" in written(matches(r"^<t>[\s\S]*?</t>\n<a>.*?</a>$"), reasoning="a\nb")
    either = written(matches(r"(?i)answer is (\w+)|So: (?P<said>[^(\]]+)"))
    assert {"answer is 42", "So: 42"} <= set(either)
    assert written(matches("(")) == []  # no pattern


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Put the final answer in \\boxed{}.", {"W\n\\boxed{42}", "\\boxed{42}"}),
        ("Think, then end with: Answer: <number>", {"W\nAnswer: 42"}),
        ('Reply with JSON only: {"why": "...", "solution": 0}', {'{"why": "Let me think.", "solution": "42"}'}),
        ([{"role": "assistant", "content": "5 and 2 is 7."}, {"role": "user", "content": "?"}], {"5 and 2 is 42."}),
        ("Answer in a block:\n```sql\n...\n```", {"W\n```sql\n42\n```", "```sql\n42\n```"}),
        ("Write\n```\n# your code here\n```", {"W\n```\n42\n```", "```\n42\n```"}),
        ("What does this print?\n```python\nprint(3)\n```", set()),
        ("Which is faster?\n```\na = 3\nb = 4\n```\n\n```\na = b = 3\nc = 5\n```", set()),
        ("Finish with\n```\n#### ...\n```", {"W\n#### 42", "#### 42"}),
        ("Read <context>a text</context> and tell.", set()),
        ("What is 3+4?", set()),
    ],
)
def test_forms_that_prompts_show(prompt, texts):
    written = {patterns.fill(form, "42", "W") for form in forms.shown_forms(prompt)}
    assert texts <= written and bool(texts) is bool(written)


@pytest.mark.parametrize(
    ("reference", "texts"),
    [
        ("$5$", ["$5$", "5"]),
        ("so \\boxed{\\frac{1}{2}}", ["so \\boxed{\\frac{1}{2}}"]),
        ("It is 3.\n#### 72", ["72"]),
        ("72 pages", ["72 pages", "72"]),
        ("1,234", ["1,234", "1234"]),
        (1234, ["1234", "1,234"]),
        ("1 234", ["1 234", "1234"]),
        ("1.234,56", ["1.234,56", "1234.56"]),
        (["Paris", "paris"], ["Paris"]),
        (None, []),
    ],
)
def test_readings_of_a_reference(reference, texts):
    assert references.readings(reference)[: len(texts)] == texts


@pytest.mark.parametrize(
    ("reference", "other"),
    [
        ("1,234.56", "1,234"),
        ("$1,234.50", "1,234"),
        ("1e3", "1"),
        ("0x1F", "0"),
        ("2x", "2"),
        ("5 million", "5"),
        ("2 or 3", "2"),
    ],
)
def test_a_part_of_a_reference_is_no_reading_of_it(reference, other):
    """A wrong answer that is taken for a right one accuses a sound function."""
    assert other not in references.readings(reference)


@pytest.mark.parametrize(
    ("text", "few"),
    [("7", []), ("1,234", []), ("\\frac{1}{2}", []), ("Paris", []), ("B", ["A", "B"]), ("no", ["no", "yes"])],
)
def test_a_wrong_answer_is_another_one_of_about_the_same_form(text, few):
    wrong = references.other_answer(text, few)
    assert wrong != text and (wrong in few or len(wrong) == len(text)) and wrong.count("\\") == text.count("\\")


def values_of(answer):
    """Return what Python reads of an answer: its number, its fraction, and its sum."""
    for read in (int, float, fractions.Fraction, unicodedata.numeric, lambda text: eval(text.replace("^", "**"))):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, NameError, ZeroDivisionError):
            yield read(answer)


ANSWERS = ["٤٢", "４２", "½", "²", "x²", "Ⅳ", "四十二", "二", "1e3", "1E-3", "1/2", "1/1", "66/6", "3-1", "-5", "50%"]
ANSWERS += ["3½", "1,234.56", "1.234,56", "1 234", "$1,234", "3.10", "0.5", "1,2,3,4,5,6,7,8,9", "москва", "π"]
ANSWERS += ["日本", "+", "?"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_no_reading_of_a_wrong_answer_is_the_right_one(answer):
    """int("٤٢") is 42, and 1/1 is 5/5: a wrong answer in other digits may be the right one."""
    wrong = references.other_answer(answer)
    assert wrong != answer and len(wrong) == len(answer)
    assert not set(values_of(wrong)) & set(values_of(answer))
    assert sorted(re.findall(r"\d+", wrong)) != sorted(re.findall(r"\d+", answer)) or not re.search(r"\d", answer)


@pytest.mark.parametrize("few", [["yes", "Yes", "no"], ["yes", "yes.", "no"]])
def test_another_way_to_write_a_choice_is_no_wrong_one(few):
    assert references.other_answer("yes", few) == "no"


def test_rows_whose_right_answer_is_not_told_are_named(tokenizer):
    """Compared with the first row's reference: the others' right answers get what wrong ones get."""
    (answer,) = [each for each in judge(first_of_batch, tokenizer=tokenizer) if each.verdict is Verdict.SUSPECTED]
    assert "for 3 of 4 rows" in answer.evidence and answer.key == "F14:reward_funcs[0]:first row"


def test_a_function_that_the_trainer_never_called_is_told(tokenizer):
    given = training([shorter, exact], processing_class=tokenizer)
    given.called = {0}
    findings = found(judge_rewards(given))
    assert [(each.failure, each.part) for each in findings] == [("F14", "reward_funcs[1]")]
    assert (
        "2 functions given, 1 called" in findings[0].evidence and given.rewards.functions[1] == "reward_funcs[1] exact"
    )


def test_two_lambdas_of_one_line_are_not_taken_for_each_other(tokenizer):
    """Which of them a source line belongs to is unknown, so nothing is said of what they read."""
    pair = [lambda completions, **_: [1.0] * len(completions), lambda completions, **_: list(map(len, completions))]
    (answer,) = judge(pair[0], tokenizer=tokenizer)
    assert answer.verdict is Verdict.NOT_CHECKED
    assert not found(judge(pair[1], tokenizer=tokenizer))


def test_rewards_that_a_blind_question_tells_apart_do_not_hold(monkeypatch):
    """Whatever comes back as different: here the function that is planted differs."""
    monkeypatch.setattr("failurelab.rewards.survey.one_for_all", exact)
    answers = [answer for answer in judge(exact) if answer.failure == "F10"]
    assert [answer.verdict for answer in answers] == [Verdict.NOT_CHECKED] and "is not seen as equal" in answers[0].why


@pytest.mark.parametrize("answers", [[{"v": "7"}, {"v": "8"}, {"v": "9"}, {"v": "4"}], [None] * 4])
def test_a_reference_without_a_text_is_told(answers, tokenizer):
    """A dict or nothing: such a column is compared with a text, and never matches."""

    def compares(completions, answer, **_):
        return [float(text.strip() == str(right)) for text, right in zip(completions, answer)]

    (finding,) = found(judge(compares, {**PLAIN, "answer": answers}, tokenizer))
    assert finding.failure == "F14" and f"answer is {type(answers[0]).__name__}" in finding.evidence


class Judge:
    """A pairwise judge with the right answers by their prompts, as trl's base class has it."""

    def __init__(self, rank):
        self.rank = rank
        self.answers = dict(zip(PLAIN["prompt"], PLAIN["answer"]))

    def judge(self, prompts, completions, shuffle_order=True):
        return self.rank(self, prompts, completions)


def by_answer(judge, prompts, completions, read=str):
    right = [judge.answers.get(read(prompt), "") for prompt in prompts]
    return [int(right not in one and right in two) for right, (one, two) in zip(right, completions)]


def without_roles(text):
    return text.removeprefix("User: ").strip()


def by_length(judge, prompts, completions):
    return [int(len(two) > len(one)) for one, two in completions]


def of(rank):
    return lambda judge, prompts, completions: [rank] * len(prompts)


@pytest.mark.parametrize(
    ("rank", "rows", "verdict", "fault", "words"),
    [
        (by_answer, PLAIN, Verdict.HELD, "", "the right one of"),
        (by_answer, CHAT, Verdict.FOUND, "look-up", "up in self.answers"),
        (lambda *given: by_answer(*given, without_roles), CHAT, Verdict.HELD, "", "the right one of"),
        (lambda *given: [1 - rank for rank in by_answer(*given)], PLAIN, Verdict.FOUND, "sign", "takes the wrong one"),
        (of(0), PLAIN, Verdict.SUSPECTED, "order", "takes the first each time"),
        (by_length, PLAIN, Verdict.SUSPECTED, "order", "takes the first each time"),
        (of(-1), PLAIN, Verdict.SUSPECTED, "", "fails (-1)"),
        (of(0.7), PLAIN, Verdict.FOUND, "", "0.7 among its ranks"),
        (lambda judge, prompts, completions: [0], PLAIN, Verdict.FOUND, "", "a list of 1"),
        (lambda judge, prompts, completions: 1 / 0, PLAIN, Verdict.NOT_CHECKED, "", "ZeroDivisionError"),
        (
            lambda judge, prompts, completions: [random.SystemRandom().randint(0, 1) for _ in prompts],
            PLAIN, Verdict.SUSPECTED, "", "when it is asked again",
        ),
    ],
)  # fmt: skip
def test_a_pairwise_judge_is_asked_in_both_orders(rank, rows, verdict, fault, words):
    """A judge was not asked at all: one that looked its prompts up in vain trained on the order of the pairs."""
    rows = datasets.Dataset.from_dict({"prompt": rows["prompt"]})
    trainer = types.SimpleNamespace(judge=Judge(rank), reward_funcs=None)
    (answer,) = judge_preferences(Training(trainer, {}, dataset=rows))
    assert (answer.key, answer.verdict) == (f"F14:judge{':' * bool(fault)}{fault}", verdict)
    assert words in f"{answer.evidence}{answer.why}"
    assert bool(answer.tried) is (fault in ("look-up", "sign"))


def test_a_judge_without_references_is_asked_about_texts_that_differ():
    rows = datasets.Dataset.from_dict({"prompt": ["Tell me of bears.", "And of bees."]})
    for rank, verdict in ((by_length, Verdict.HELD), (of(1), Verdict.SUSPECTED)):
        trainer = types.SimpleNamespace(judge=Judge(rank), reward_funcs=None)
        trainer.judge.answers = {}
        (answer,) = judge_preferences(Training(trainer, {}, dataset=rows))
        assert answer.verdict is verdict, answer.evidence


def own_reference(completions, answer, **_):
    return [float(right == text) for right, text in zip(answer, completions)]


def as_texts(completions, answer, **_):
    return [str(value) for value in own_reference(completions, answer)]


@pytest.mark.parametrize(
    ("function", "mark", "fault", "verdict"),
    [
        (as_texts, "", "count", "FOUND"),
        (own_reference, "First add.\n#### ", "reference", "FOUND"),
        (own_reference, "", "", "HELD"),
    ],
)
def test_what_looked_well_and_is_not(function, mark, fault, verdict):
    """Each was HELD: a text that reads as a number, and a whole solution as the answer."""
    rows = [{"prompt": text, "answer": mark + answer} for text, answer in zip(PLAIN["prompt"], PLAIN["answer"])]
    table = survey.survey([function], Inputs(rows, ["answer"])).table
    assert (fault, verdict) in [(flag.fault, flag.verdict) for flag in table.flags]


def anywhere(completions, answer, **_):
    return [float(right.lower() in text(each).lower()) for each, right in zip(completions, answer)]


def first_number(completions, answer, **_):
    return [float(re.findall(r"\d+", text(each))[:1] == [right]) for each, right in zip(completions, answer)]


def last_number(completions, answer, **_):
    return [float(re.findall(r"\d+", text(each))[-1:] == [right]) for each, right in zip(completions, answer)]


REVIEWS = {"prompt": ["I liked it. Positive or negative?", "I slept. Positive or negative?"] * 2}
REVIEWS["answer"] = ["positive", "negative"] * 2
ECHO = {"prompt": ["Say Paris.", "Say Rome.", "Say Lima.", "Say Bonn."], "answer": ["Paris", "Rome", "Lima", "Bonn"]}


@pytest.mark.parametrize(
    ("function", "rows", "accused", "noted"),
    [
        (anywhere, PLAIN, False, True),
        (anywhere, CHAT, False, True),
        (anywhere, REVIEWS, True, False),
        (anywhere, ECHO, False, True),  # the prompt is what is to be said
        (first_number, CHAT, False, True),
        (last_number, CHAT, False, False),
        (exact, REVIEWS, False, False),
        (exact, PLAIN, False, False),
    ],
)
def test_an_answer_that_is_mentioned_on_the_way(function, rows, accused, noted, tokenizer):
    """Many functions that look for it anywhere train well: suspected alone where a copy of the prompt is paid."""
    given = training(function, rows, processing_class=tokenizer)
    suspected = [answer for answer in judge_rewards(given) if answer.verdict is not Verdict.HELD]
    assert [(answer.verdict, answer.fault) for answer in suspected] == [(Verdict.SUSPECTED, "copy")] * accused
    assert any("mentions the right one" in note for note in given.rewards.notes) is noted


def by_the_rollout(completions, final, answer, **_):
    return [float(last == right) - 0.01 * len(text(each)) for each, last, right in zip(completions, final, answer)]


@pytest.mark.parametrize("functions", [[by_the_rollout], [by_the_rollout, exact]])
def test_what_a_rollout_function_hands_on_cannot_be_made_up(functions, tokenizer):
    """`final` has a value for each completion that was drawn: asked about more, the function was accused."""
    given = training(functions, PLAIN, processing_class=tokenizer)
    given.reward_inputs = {"prompts": ["3+4="] * 8, "completions": ["7"] * 8, "answer": ["7"] * 8, "final": ["7"] * 8}
    answers = list(judge_rewards(given))
    assert {answer.verdict for answer in answers} <= {Verdict.HELD, Verdict.NOT_CHECKED}
    assert any("reads final" in answer.why for answer in answers)
