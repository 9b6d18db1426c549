"""Reward functions asked about made-up completions: what each can never reward, and silence for what is only odd."""

import asyncio
import copy
import dataclasses
import operator
import os
import random
import re
import tempfile
import time
import types

import datasets
import pytest
import trl
from packaging.version import Version

from failurelab_preflight import repairs
from failurelab_preflight.finding import Verdict
from failurelab_preflight.judges import batch
from failurelab_preflight.judges.preferences import judge_preferences
from failurelab_preflight.judges.rewards import judge_rewards
from failurelab_preflight.judges.rows import installed_version
from failurelab_preflight.rewards import asking, forms, references
from failurelab_preflight.stage.processes import Stopped
from failurelab_preflight.training import Training

PLAIN = {"prompt": ["3+4=", "5+6=", "8+9=", "12+30="], "answer": ["7", "11", "17", "42"]}
CHAT = PLAIN | {"prompt": [[{"role": "user", "content": text}] for text in PLAIN["prompt"]]}
WORDS = {"prompt": ["Capital of France?", "Of Italy?", "Of Spain?", "Of Peru?"]}
WORDS["answer"] = ["Paris", "Rome", "Madrid", "Lima"]
KINDS = PLAIN | {"task": ["math", "coding", "math", "coding"]}
MASKED = installed_version("trl") >= Version("0.16")  # None and NaN are left out of the sum
R1 = "Think first: <think> reasoning process here </think><answer> answer here </answer>"
XML = "Respond in this format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
QUERY = "Think first. Then write your query:\n```sql\n-- your query here\n```"
CODE = "Box the answer. Given is this code:\n```python\nprint(3)\n```"
OPENED = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>{{ '<think>\n' }}"


@pytest.fixture
def in_forks():
    """Ask in processes of their own, as preflight does: requested by tests of what these are there for."""


@pytest.fixture(autouse=True)
def asked_here(request, monkeypatch):
    """Ask in this process: a fork of so large a one takes as long as all else. A second call is made in a fork."""
    if "in_forks" in request.fixturenames:
        return
    fork, ask = asking.in_fork, asking.Asker.ask

    def ask_here(asker, make, count, prepare=None, size=0):
        with pytest.MonkeyPatch.context() as forks:
            if prepare:
                forks.setattr(asking, "in_fork", fork)
            return ask(asker, make, count, prepare, size)

    monkeypatch.setattr(asking, "in_fork", lambda call, limit: call())
    monkeypatch.setattr(asking.Asker, "ask", ask_here)


def told(system):
    """Return rows whose prompts begin with a system's message."""
    prompts = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in PLAIN["prompt"]]
    return PLAIN | {"prompt": prompts}


def answers_as(write):
    return CHAT | {"answer": [write(answer) for answer in PLAIN["answer"]]}


def text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def each(pay):
    """Return a reward function that pays each completion by its text and its row's answer."""

    def reward(completions, answer, **_):
        return [pay(text(completion), right) for completion, right in zip(completions, answer)]

    return reward


def of_call(pay):
    """Return a reward function that pays by all texts and answers of a call."""

    def reward(completions, answer, **_):
        return pay([text(completion) for completion in completions], answer)

    return reward


def mean(values):
    return sum(values) / len(values)


def unaware(pay):
    """Return a reward function that asks for no column."""

    def reward(completions, **_):
        return [pay(text(completion)) for completion in completions]

    return reward


exact = each(lambda said, right: float(said == right))
stripped = each(lambda said, right: float(said.strip() == right))
stripped_and_short = each(lambda said, right: float(said.strip() == right) - 0.05 * len(said))
last_number = each(lambda said, right: float(re.findall(r"-?\d+", said)[-1:] == [right]))
tagged = each(lambda said, right: 2.0 * bool(re.search(rf"<answer>\s*{re.escape(right)}\s*</answer>", said)))
errors_paid = each(lambda said, right: float(said != right))
lower = each(lambda said, right: float(right in said.lower()))
boxed = each(lambda said, right: float(re.findall(r"\\boxed\{(.*?)\}", said)[-1:] == [right]))
sql_block = each(lambda said, right: float(said.partition("```sql\n")[2].partition("```")[0].strip() == right))
in_each_other = each(lambda said, right: float(said.strip() in right or right in said))
# To be paid with a negative weight: nothing for a right answer, and 1 for no number at all.
miss = each(lambda said, right: min(abs(int(said) - int(right)), 10) / 10 if said.isdecimal() else 1.0)
nan_for_no_number = each(lambda said, right: float(said == right) if re.search(r"\d", said) else float("nan"))
distance = each(lambda said, right: -abs(int([-100, *re.findall(r"\d+", said)][-1]) - int(right)))
as_texts = of_call(lambda said, right: [*map(str, exact(said, right))])
one_number = of_call(lambda said, right: mean(exact(said, right)))
mean_of_all = of_call(lambda said, right: [mean(exact(said, right))] * len(said))
first_of_batch = of_call(lambda said, right: [float(one == right[0]) for one in said])
# As a process pays that counts from another one's rows.
of_another_row = of_call(lambda said, right: exact(said, [*right[len(said) // 2 :], *right[: len(said) // 2]]))
of_the_group = of_call(lambda said, right: [mean(exact(said, right)[at // 4 * 4 :][:4]) for at in range(len(said))])
above_its_group = of_call(lambda said, right: [*map(operator.sub, exact(said, right), of_the_group(said, right))])
above_the_mean = of_call(lambda said, right: [one - mean(distance(said, right)) for one in distance(said, right)])
shorter = unaware(lambda said: -float(len(said)))
flat = unaware(lambda said: 0.0 * len(said))
half = unaware(lambda said: 0.5)
all_none = unaware(lambda said: None)
infinite = unaware(lambda said: float("inf") if "answer" in said else 0.0)
first_word = unaware(lambda said: float(said.split()[0] == "The"))
ended = unaware(lambda said: float(said.endswith("<|im_end|>")))


def noise(scale):
    return unaware(lambda said: scale * random.random())


def matches(pattern, flags=0):
    """Return a reward for a format, as people write them."""
    return unaware(lambda said: 1.0 if re.match(pattern, said, flags) else 0.0)


async def later(completions, answer, **_):
    await asyncio.sleep(0)
    return exact(completions, answer)


class Scorer:
    """As many write them: an object that is called."""

    def __call__(self, completions, answer, **_):
        return tuple(tagged(completions, answer))


def unread(completions, **_):
    return [0.0 for _ in completions]


def catches_all(completions, **_):
    """As people run what a model has written: no made-up completion is a program."""
    paid = []
    for completion in completions:
        try:
            paid.append(float(eval(text(completion).strip()) == "no such value"))
        except Exception:
            paid.append(0.0)
    return paid


def some(completions, **_):
    return [float(len(text(completion))) for completion in completions if text(completion)]


def messages_as_text(completions, answer, **_):
    return [float(right in completion) for completion, right in zip(completions, answer)]


def another_column(completions, solution, **_):
    return exact(completions, solution)


def another_key(completions, **kwargs):
    return exact(completions, kwargs["solution"])


def another_key_got(completions, **kwargs):
    wanted = kwargs.get("solution") or [None] * len(completions)
    return [float(text(completion) == str(right)) for completion, right in zip(completions, wanted)]


def no_kwargs(completions):
    return [float(len(completion)) for completion in completions]


def coding_alone(completions, task, **_):
    return [float("def" in text(c)) if kind == "coding" else None for c, kind in zip(completions, task)]


def raising(on, function):
    """Return the reward function with an error of its own for completions that `on` is true for."""

    def raises(completions, answer, **_):
        if any(on(text(completion), right) for completion, right in zip(completions, answer)):
            raise RuntimeError("not expected")
        return function(completions=completions, prompts=list(answer), answer=answer)

    return raises


def cutting(completions, answer, **_):
    """Pay the first digit, and leave nothing else to whoever comes after."""
    for completion in completions:
        completion[0]["content"] = completion[0]["content"][:1]
    return [float(text(completion) == right[:1]) for completion, right in zip(completions, answer)]


def fines_the_right(prompts, completions, **_):
    """Add up what the prompt asks for, without a column, and take two off where that is the answer."""
    return [-2.0 * (text.strip() == str(eval(prompt.strip("=")))) for prompt, text in zip(prompts, completions)]


def remembering(kept):
    """Return a reward that is paid for what was not answered before."""

    def new(completions, answer, **_):
        paid = [float(text(c) == right and text(c) not in kept) for c, right in zip(completions, answer)]
        kept.update(map(text, completions))
        return paid

    return new


def by_text(kept):
    """Return a reward that remembers what a text got, whatever the question was."""

    def cached(completions, answer, **_):
        return [kept.setdefault(text(c), float(text(c) == right)) for c, right in zip(completions, answer)]

    return cached


def counting(completions, answer, calls=[0], **_):  # noqa: B006
    """A bonus that grows from call to call: which answers are right, it goes on telling."""
    calls[0] += 1
    return [value * calls[0] for value in exact(completions, answer)]


def once(completions, answer, calls=[], **_):  # noqa: B006
    """Raise where the process has called it before: the parent's calls do not count."""
    if os.getpid() in calls:
        raise ValueError("the iterator is empty")
    calls.append(os.getpid())
    return exact(completions, answer)


def training(functions, rows=PLAIN, **attributes):
    functions = functions if isinstance(functions, list) else [functions]
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    args = types.SimpleNamespace(remove_unused_columns=attributes.pop("remove_unused_columns", False))
    given = dict.fromkeys(("environment_factories", "tools", "chat_template", "reward_weights", "state"))
    given |= {"chat_template_kwargs": {}, "_is_vlm": False, "reward_funcs": functions, "args": args}
    vars(trainer).update(given | attributes)
    drawn = [[(1, 2), (1, 3)], [(4, 5)] * 2]  # some groups of a run may well be alike
    return Training(trainer=trainer, arguments={}, dataset=datasets.Dataset.from_dict(rows), drawn=drawn)


def judge(functions, rows=PLAIN, tokenizer=None, **attributes):
    return list(judge_rewards(training(functions, rows, processing_class=tokenizer, **attributes)))


def found(answers):
    return [answer for answer in answers if answer.verdict is Verdict.FOUND]


def in_short(answers):
    """Return verdicts: the failure and its fault, which function has it, whether an undo was tried, and if it ends."""
    lines = []
    for each in answers:
        fault, place = f":{each.fault}" * bool(each.fault), each.part.replace("reward_funcs[", " @").replace("]", "")
        undone = " tried" * bool(each.tried) + " ends" * each.ends
        lines.append(f"{each.verdict.value} {each.failure}{fault}{place}{undone}")
    return ", ".join(sorted(lines))


NUMBERS = PLAIN | {"answer": [7, 11, 17, 42]}
MISSING = PLAIN | {"answer": ["7", "11", None, "42"]}
LATER = {name: 48 * values for name, values in KINDS.items()}
R1_TAGS = r"^<think>.*?</think><answer>.*?</answer>$"
WELL = "HELD F10, HELD F14"
WELL_BUT = "HELD F10, HELD F14, NOT CHECKED F14 @"
NO_REFERENCE = "HELD F10, NOT CHECKED F14 @0"
REFERENCE = "FOUND F14:reference @0 tried"
FORM = "FOUND F14:form @0 tried"
COLUMN = "FOUND F14:column @0 tried ends"
RAISES = "FOUND F14:raises @0 tried ends"
LINES = "FOUND F14:line breaks @0 tried, HELD F10"
SIGN = "FOUND F14:sign @{} tried, HELD F10"
UNKNOWN = "NOT CHECKED F14 @0"
IN_PLACE = "HELD F10, SUSPECTED F14:in place @"
CASES = {
    # The right answer gets more, in both forms of a dataset, and as people write such functions.
    "plain": (WELL, exact),
    **{f"chat-{n}": (WELL, f, CHAT) for n, f in enumerate((later, Scorer()))},
    # Without a reference nobody but its author knows whether it pays for what is wanted (TRL #2771).
    "shorter": (NO_REFERENCE, shorter, CHAT),
    # The same for all, and what was measured with one thing undone.
    "unread": ("SUSPECTED F10:unread @0", unread, CHAT),
    "catches": (UNKNOWN, catches_all, CHAT),
    "read-and-flat": ("SUSPECTED F10 @0", unaware(lambda said: 0.5 + 0 * len(said))),
    "flat-beside": ("HELD F10, HELD F14, NOT CHECKED F10 @0", [half, exact]),
    "one-number": ("FOUND F10:one number @0 tried", one_number),
    "a-batch": ("FOUND F10:batch @0 tried", mean_of_all),
    "a-group": ("FOUND F10:groups", of_the_group),
    "within-its-group": (WELL, above_its_group),
    "another-row": ("FOUND F14:pairs @0 tried", of_another_row),
    "first-row": ("HELD F10, NOT CHECKED F14", first_of_batch),
    "count": ("FOUND F14:count @0 ends", some),
    "texts": ("FOUND F14:count @0 ends", as_texts),
    "lower-case": (REFERENCE, lower, WORDS),
    "number-and-short": (f"{REFERENCE}, HELD F10", stripped_and_short, NUMBERS),
    "unit": (REFERENCE, last_number, answers_as("{} pages".format)),
    "no-reference": (UNKNOWN, stripped, PLAIN | {"answer": [None] * 4}),
    "messages": (FORM, messages_as_text, CHAT),
    "argument": (COLUMN, another_column),
    "key": (COLUMN, another_key),
    "key-got": ("FOUND F14:column @0 tried", another_key_got),
    "keywords": ("FOUND F14:keywords @0 tried ends", no_kwargs),
    "sign": (SIGN.format(0), errors_paid, CHAT),
    "infinite": ("FOUND F14:no number @0", infinite),
    # Chance that breaks ties, and chance that drowns the others.
    "a-tie": (WELL_BUT + "0", [noise(1e-3), exact]),
    "drowned": ("FOUND F14:chance @0, HELD F10", [noise(1.0), exact]),
    # An error for some completions hides nothing of what is given to the others.
    "raises": (f"{RAISES}, {NO_REFERENCE}", first_word),
    "raises-sign": (f"{RAISES}, {SIGN.format(0)}", raising(lambda said, right: not said, errors_paid)),
    "raises-row": (
        f"FOUND F10:batch @0 tried, {RAISES}",
        raising(lambda said, right: right is None, mean_of_all),
        MISSING,
    ),
    # A format that no completion has: open-r1 #237; TRL #6966: the prompt has the tag.
    "no-dotall": (LINES, [matches(R1_TAGS), last_number], told(R1)),
    "dotall": (WELL_BUT + "0", [matches(R1_TAGS, re.S), last_number], told(R1)),
    "asked-for-one-line": (NO_REFERENCE, matches(R1_TAGS), told("In one line. " + R1)),
    "opened": (f"{FORM}, HELD F10", [matches(r"^<think>.*?</think>", re.S), last_number], CHAT, OPENED),
    "opened-well": (WELL_BUT + "0", [matches(r"^(<think>)?.*?</think>", re.S), last_number], CHAT, OPENED),
    "ended": (WELL_BUT + "1", [exact, ended], CHAT),
    # A form that the prompt shows is to be paid; a block that is a part of the question is none.
    "shown": (WELL, sql_block, told(QUERY)),
    "not-shown": (f"{FORM}, HELD F10", boxed, told(QUERY)),
    "question": (WELL, boxed, told(CODE)),
    "empty-is-right": ("HELD F10, SUSPECTED F14", in_each_other),
    # Every second row is of one kind: rows that are looked at in even steps would all be of the other.
    "kinds": ("HELD F10, HELD F14, NOT CHECKED F14 @1", [last_number, coding_alone], LATER),
    # Weights. Nobody may have asked for right answers, as of a tutor who must not tell. A weight of 0 beside another
    # that asks is odd and no more.
    "cancel": ("FOUND F10, NOT CHECKED F14 @1", [exact, exact], [1.0, -1.0]),
    "negative": (SIGN.format(0), [exact], [-1.0]),
    "tutor": ("HELD F10, NOT CHECKED F14 @0, NOT CHECKED F14 @1", [exact, shorter], [-1.0, 1.0]),
    "right-at-0": ("FOUND F14 tried, HELD F10, NOT CHECKED F14 @1", [exact, shorter], [0.0, 1.0]),
    "one-at-0": (WELL, [exact, distance], [0.0, 1.0]),
    # Lab 32: what is below 0 already, and is turned by its weight once more, pays for being far off.
    "turned-twice": (SIGN.format(1), [exact, distance], [1.0, -0.1]),
    "turned-twice-small": (WELL_BUT + "1", [exact, distance], [1.0, -0.001]),
    "turned": (WELL, [exact, miss], [1.0, -1.0]),
    # Each by itself is right, or asks for nothing; their sum pays what is wrong.
    "turned-by-another": ("FOUND F14:sign tried, HELD F10, NOT CHECKED F14 @1", [exact, fines_the_right]),
    # Beside a reward for short completions that outweighs it a right answer is told from a wrong one, and no more.
    "outweighed": ("HELD F10, NOT CHECKED F14, NOT CHECKED F14 @1", [exact, shorter], [1.0, 1.0]),
    # What a function leaves to those after it, which get the same lists, and what it keeps from call to call.
    "in-place": (IN_PLACE + "0", [cutting, exact], CHAT),
    "in-place-last": (WELL, [exact, cutting], CHAT),
    "memory": ("SUSPECTED F14:memory @0", remembering(set())),
    "second-call": ("FOUND F14:second call @0 tried ends", once),
    "counting": (WELL, counting),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_reward_functions(case, tokenizer):
    """Each kind of function that people write, in a line of verdicts; words are the goldens'."""
    said, functions, *more = CASES[case]
    weights = more.pop(0) if more and isinstance(more[0], list) else None
    rows, template, *_ = [*more, None, None]
    own = copy.deepcopy(tokenizer)
    own.chat_template = template or own.chat_template
    assert in_short(judge(functions, rows or PLAIN, own, reward_weights=weights)) == said


def test_reward_functions_of_one_name_are_told_apart(tokenizer):
    """The same function twice: each answer says the place in reward_funcs, and so does its repair."""
    (finding,) = found(judge([exact, exact], tokenizer=tokenizer, reward_weights=[1.0, -2.0]))
    assert finding.part == "reward_funcs[1]"
    assert finding.undo == repairs.Arguments({"reward_weights": [1.0, 2.0]})
    (finding,) = found(judge(another_key, tokenizer=tokenizer))
    assert type(finding.undo) is repairs.Keyword


@pytest.mark.parametrize("special", [True, False])
def test_tags_that_the_trainer_leaves_out_where_it_decodes(special, tokenizer):
    """A tag that was added as a special token is in no completion; one that was added as a word is."""
    own = copy.deepcopy(tokenizer)
    own.add_tokens(["<answer>", "</answer>"], special_tokens=special)
    assert in_short(judge(tagged, told(R1), own)) == (UNKNOWN if special else WELL)


@pytest.mark.parametrize("function", [nan_for_no_number, all_none, coding_alone])
def test_none_is_masked_by_the_releases_that_mask_it(function, tokenizer):
    """Releases 0.14 and 0.15 add NaN to the sum, and None is an error there; later ones leave both out."""
    answers = judge([function, last_number], KINDS, tokenizer)
    assert bool(found(answers)) is not MASKED
    assert not any(answer.part == "reward_funcs[0]" for answer in answers if answer.verdict is Verdict.HELD)


@pytest.mark.parametrize(
    ("function", "device", "held"),
    [(above_the_mean, 1, False), (above_the_mean, 4, True), (exact, 1, True)],
)
def test_a_function_is_called_with_as_many_completions_as_a_process_has(function, device, held, tokenizer, monkeypatch):
    """A rank of one completion is always the best; four are a whole group."""
    monkeypatch.setattr(batch.cuts, "counts_prompts", lambda: False)
    given = training(function, processing_class=tokenizer)
    given.arguments.update(num_generations=4, per_device_train_batch_size=device, steps_per_generation=1)
    given.world_size = 4
    answers = list(judge_rewards(given))
    assert not [answer for answer in answers if answer.accuses]
    assert [answer.failure for answer in answers if answer.verdict is Verdict.HELD] == ["F10", "F14"] * held
    assert any("completions at a time" in note for note in given.rewards.notes) is (device < 4)


@pytest.mark.parametrize(
    ("drawn", "small", "verdict"),
    [
        ([[(1, 2)] * 4, [(3, 4)] * 4], True, Verdict.FOUND),
        ([[(1, 2)] * 4, [(3, 4)] * 4], False, Verdict.NOT_CHECKED),  # a real model may be as sure
        ([[(1,)] * 4, [(3,)] * 4], True, Verdict.NOT_CHECKED),
        ([[(1, 2)] * 4, [(3, 4), (3, 5)]], True, Verdict.HELD),
        ([], True, Verdict.NOT_CHECKED),
    ],
)
def test_completions_of_a_prompt_that_are_all_the_same(drawn, small, verdict, tokenizer):
    asked = dataclasses.replace(training(exact, processing_class=tokenizer), drawn=drawn, small=small)
    assert {each.verdict for each in judge_rewards(asked) if each.failure == "F10"} == {verdict}


@pytest.mark.parametrize("called", [{0}, {0, 1}])
def test_a_function_that_training_never_calls_is_not_accused(called, tokenizer):
    """F10 was SUSPECTED of a reward function that stood there because trl asks for one."""
    given = training([exact, unread], processing_class=tokenizer)
    given.finished, given.called = True, called
    (answer,) = [each for each in judge_rewards(given) if each.part == "reward_funcs[1]" and each.failure == "F10"]
    assert answer.verdict is Verdict.NOT_CHECKED and ("training never called" in answer.why) is (called == {0})


@pytest.mark.parametrize("name", ["_calculate_rewards", "log"])
def test_rewards_that_go_through_a_method_of_the_script_s_own_are_not_held(name, tokenizer):
    """An override that made them all equal had F10 HELD, by what the functions alone pay."""
    given = training([exact], processing_class=tokenizer)
    kind = type("Own", (type(given.trainer),), {name: lambda self, *args: None})
    given.trainer.__class__, given.own = kind, lambda file: file == __file__
    held = {each.failure for each in judge_rewards(given) if each.verdict is Verdict.HELD}
    assert held == ({"F10", "F14"} if name == "log" else set())


def test_columns_that_the_trainer_drops(tokenizer):
    (finding,) = found(judge(exact, tokenizer=tokenizer, remove_unused_columns=True))
    assert finding.undo == repairs.Arguments({"remove_unused_columns": False}) and finding.ends


def test_what_the_trainer_handed_over_is_what_a_function_is_asked_with(tokenizer):
    """The run's own call says which columns and objects arrive; its completions are asked about too."""

    def by_ids(completions, completion_ids, trainer_state, **_):
        return [float(len(ids)) for ids in completion_ids]

    given = training(by_ids, processing_class=tokenizer)
    given.reward_inputs = {"prompts": [], "completions": ["~~~"], "completion_ids": [[5]], "trainer_state": None}
    answers = list(judge_rewards(given))
    assert in_short(answers) == NO_REFERENCE and "~~~" in {line.text for line in given.rewards.lines}
    given.reward_inputs = {"prompts": [], "completions": []}
    (finding,) = found(judge_rewards(given))
    assert "asks for completion_ids, trainer_state" in finding.evidence and finding.ends


def by_the_rollout(completions, final, answer, **_):
    return [float(last == right) for last, right in zip(final, answer)]


def by_name(name):
    return lambda completions, **given: [float(last) for last in given[name]]


@pytest.mark.parametrize("function", [by_the_rollout, by_name("final")], ids=["an argument", "a key"])
def test_what_a_rollout_function_hands_on_cannot_be_made_up(function, tokenizer):
    """`final` has a value for each completion that was drawn: asked about more, the function was accused."""
    given = training([function, exact], PLAIN, processing_class=tokenizer)
    given.reward_inputs = {"prompts": ["3+4="] * 8, "completions": ["7"] * 8, "answer": ["7"] * 8, "final": ["7"] * 8}
    answers = list(judge_rewards(given))
    assert {answer.verdict for answer in answers} <= {Verdict.HELD, Verdict.NOT_CHECKED}
    assert any("reads final" in answer.why for answer in answers)


def test_rewards_that_a_blind_question_tells_apart_do_not_hold(monkeypatch):
    """Whatever comes back as different: here the function that is planted differs."""
    monkeypatch.setattr("failurelab_preflight.rewards.survey.one_for_all", exact)
    (answer,) = [answer for answer in judge(exact) if answer.failure == "F10"]
    assert answer.verdict is Verdict.NOT_CHECKED and "is not seen as equal" in answer.why


# What is not here, and what goes wrong while a function is asked.


def needing(what):
    """Return a reward function that needs what is not here."""
    return lambda completions, **_: [float(len(str(what())))] * len(completions)


def no_service():
    raise ConnectionError("the judge does not answer")


def never_returns():
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


def other_process():
    raise Stopped("starts another process, python score.py")


NOT_HERE = {
    "service": needing(no_service),
    "package": needing(lambda: __import__("a_package_that_nobody_has")),
    "key": needing(lambda: os.environ["KEY_OF_A_JUDGE_THAT_IS_NOT_HERE"]),
    "process": needing(other_process),
    "life": needing(lambda: os._exit(3)),
    "end": needing(never_returns),
}


@pytest.mark.parametrize("what", NOT_HERE)
def test_what_is_not_here_is_no_failure(what, tokenizer, monkeypatch, in_forks):
    monkeypatch.setattr(asking, "LIMIT", 1.0 if what == "end" else asking.LIMIT)
    monkeypatch.setattr(NOT_HERE[what], "__name__", f"no_{what}")
    answers = judge([last_number, NOT_HERE[what]], CHAT, tokenizer)
    (answer,) = [answer for answer in answers if answer.verdict is Verdict.NOT_CHECKED]
    assert answer.failure == "F14" and f"no_{what}" in answer.why and not found(answers)


def test_a_reward_that_remembers_a_text_under_another_question_is_not_held(tokenizer, in_forks):
    """Its second call was for the same questions, so that what was remembered was right, and F14 was held."""
    assert "SUSPECTED F14:memory @0" in in_short(judge(by_text({}), CHAT, tokenizer))

    def only_its_own(prompts, completions, answer, **_):
        assert list(answer) == [CHAT["answer"][CHAT["prompt"].index(prompt)] for prompt in prompts]
        return last_number(completions, answer)

    assert in_short(judge(only_its_own, CHAT, tokenizer)) == WELL  # another question's answer is an error of ours


def test_what_a_function_starts_prints_and_writes_is_gone(tokenizer, monkeypatch, tmp_path, capfd, gone, in_forks):
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

    assert in_short(judge(busy, CHAT, tokenizer)) == WELL
    assert "scoring" not in "".join(capfd.readouterr()) and not (tmp_path / "rewards.log").exists()
    children = [int(path.name) for path in left.iterdir()]
    # once, twice for what it keeps from call to call, and once in the groups of the run
    assert len(children) == 4 and gone(children) == []


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Put the final answer in \\boxed{}.", {"W\n\\boxed{42}", "\\boxed{42}"}),
        ("Write\nWhy: <one sentence>\nResult: <number>", {"Why: W\nResult: 42"}),
        ('Reply with JSON only: {"why": "...", "solution": 0}', {'{"why": "Let me think.", "solution": "42"}'}),
        ([{"role": "assistant", "content": "5 and 2 is 7."}, {"role": "user", "content": "?"}], {"5 and 2 is 42."}),
        ("Answer in a block:\n```sql\n...\n```", {"W\n```sql\n42\n```", "```sql\n42\n```"}),
        ("Use <think> </think> and <answer> </answer>.", {"<think>W</think>\n<answer>42</answer>"}),
        (XML, {"<reasoning>\nW\n</reasoning>\n<answer>\n42\n</answer>"}),
        ("What does this print?\n```python\nprint(3)\n```", set()),
        ("Finish with\n```\n#### ...\n```", {"W\n#### 42", "#### 42"}),
        ("Read <context>a text</context> and tell.", set()),
    ],
)
def test_forms_that_prompts_show(prompt, texts):
    shown = forms.shown_forms(prompt)
    written = {form.replace(forms.ANSWER, "42").replace(forms.REASONING, "W") for form in shown}
    assert texts <= written and bool(texts) is bool(written)


@pytest.mark.parametrize(
    ("reference", "texts", "not_its"),
    [
        ("$5$", ["$5$", "5"], "$"),
        ("so \\boxed{\\frac{1}{2}}", ["so \\boxed{\\frac{1}{2}}"], "1"),
        ("It is 3.\n#### 72", ["72"], "3"),
        ("72 pages", ["72 pages", "72"], "2"),
        ("1,234", ["1,234", "1234"], "1"),
        (1234, ["1234", "1,234"], "1"),
        (7.0, ["7", "7.0"], "0"),
        (["Paris", "paris"], ["Paris"], "paris"),
        (None, [], ""),
    ],
)
def test_readings_of_a_reference(reference, texts, not_its):
    """A wrong answer that is taken for a right one accuses a sound function."""
    read = references.readings(reference)
    assert read[: len(texts)] == texts and not_its not in read


@pytest.mark.parametrize("answer", ["7", "٤٢", "½", "1/2", "3-1", "1,234.56", "москва", "\\frac{1}{2}", "+"])
def test_a_wrong_answer_is_another_one_of_the_same_length(answer):
    """int("٤٢") is 42, and 1/1 is 5/5: a wrong answer in other digits may be the right one."""
    wrong = references.other_answer(answer)
    assert wrong != answer and len(wrong) == len(answer) and wrong.count("\\") == answer.count("\\")
    assert not re.search(r"\d", answer) or sorted(re.findall(r"\d+", wrong)) != sorted(re.findall(r"\d+", answer))


def test_a_wrong_choice_is_another_of_the_dataset():
    assert references.other_answer("yes", ["yes", "Yes", "no"]) == "no"


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


def by_exact_text(judge, prompts, completions):
    """Decide where one of both is the bare answer: of the other forms it says nothing, and takes the first."""
    right = [judge.answers[prompt] for prompt in prompts]
    return [int(right != one.strip() and right == two.strip()) for right, (one, two) in zip(right, completions)]


def of(rank):
    return lambda judge, prompts, completions: [rank] * len(prompts)


@pytest.mark.parametrize(
    ("rank", "rows", "verdict", "fault"),
    [
        (by_answer, PLAIN, Verdict.HELD, ""),
        (by_answer, CHAT, Verdict.SUSPECTED, "order"),
        (lambda *given: by_answer(*given, without_roles), CHAT, Verdict.HELD, ""),
        (lambda *given: [1 - rank for rank in by_answer(*given)], PLAIN, Verdict.FOUND, "sign"),
        (by_exact_text, PLAIN, Verdict.NOT_CHECKED, ""),
        (of(0), PLAIN, Verdict.SUSPECTED, "order"),
        (of(0.7), PLAIN, Verdict.FOUND, ""),
        (lambda judge, prompts, completions: 1 / 0, PLAIN, Verdict.NOT_CHECKED, ""),
    ],
)
def test_a_pairwise_judge_is_asked_in_both_orders(rank, rows, verdict, fault):
    """A judge was not asked at all: one that looked its prompts up in vain trained on the order of the pairs."""
    rows = datasets.Dataset.from_dict({"prompt": rows["prompt"], "answer": PLAIN["answer"]})
    trainer = types.SimpleNamespace(judge=Judge(rank), reward_funcs=None)
    (answer,) = judge_preferences(Training(trainer, {}, dataset=rows))
    assert (answer.key, answer.verdict) == (f"F14:judge{':' * bool(fault)}{fault}", verdict)
    assert bool(answer.tried) is (fault == "sign")
