"""Reward functions asked about made-up completions: what each can never reward, and silence for what is only odd."""

import asyncio
import contextlib
import copy
import dataclasses
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
import zlib

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
from failurelab_preflight.rewards import asking, forms, patterns, references, signature, survey
from failurelab_preflight.rewards.inputs import Inputs
from failurelab_preflight.training import Training

PLAIN = {"prompt": ["3+4=", "5+6=", "8+9=", "12+30="], "answer": ["7", "11", "17", "42"]}
CHAT = PLAIN | {"prompt": [[{"role": "user", "content": text}] for text in PLAIN["prompt"]]}
WORDS = {"prompt": ["Capital of France?", "Of Italy?", "Of Spain?", "Of Peru?"]}
WORDS["answer"] = ["Paris", "Rome", "Madrid", "Lima"]
KINDS = PLAIN | {"task": ["math", "coding", "math", "coding"]}
MASKED = installed_version("trl") >= Version("0.16")  # None and NaN are left out of the sum
ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>")
R1 = "Think first: <think> reasoning process here </think><answer> answer here </answer>"
XML = "Respond in this format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"


@pytest.fixture
def in_forks():
    """Ask in processes of their own, as preflight does: requested by tests of what these are there for."""


@pytest.fixture(autouse=True)
def asked_here(request, monkeypatch):
    """Ask in this process: a fork of so large a one takes as long as all else. What a function keeps is in a fork."""
    if "in_forks" in request.fixturenames:
        return
    fork, ask = asking.in_fork, asking.Asker.ask
    keeps = getattr(
        getattr(request.node, "callspec", None) and request.node.callspec.params.get("case"), "keeps", False
    )

    def ask_here(asker, make, count, prepare=None, size=0):
        with pytest.MonkeyPatch.context() as forks:
            if prepare or keeps:
                forks.setattr(asking, "in_fork", fork)
            return ask(asker, make, count, prepare, size)

    monkeypatch.setattr(asking, "in_fork", lambda call, limit: call())
    monkeypatch.setattr(asking.Asker, "ask", ask_here)


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
    # some groups of a run may well be alike
    return Training(
        trainer=trainer, arguments={}, dataset=datasets.Dataset.from_dict(rows), drawn=[[(1, 2), (1, 3)], [(4, 5)] * 2]
    )


def judge(functions, rows=PLAIN, tokenizer=None, **attributes):
    return list(judge_rewards(training(functions, rows, processing_class=tokenizer, **attributes)))


def found(answers):
    return [answer for answer in answers if answer.verdict is Verdict.FOUND]


@pytest.mark.parametrize(
    ("function", "rows", "kind"),
    [
        (another_key, PLAIN, repairs.Keyword),
        (infinite, PLAIN, type(None)),
    ],
)
def test_what_can_be_edited_has_an_undo(function, rows, kind, tokenizer):
    (finding,) = found(judge([function], rows, tokenizer))
    assert type(finding.undo) is kind


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


@pytest.mark.parametrize("special", [True, False])
def test_tags_that_the_trainer_leaves_out_where_it_decodes(special, tokenizer):
    """A tag that was added as a special token is in no completion; one that was added as a word is."""
    own = copy.deepcopy(tokenizer)
    own.add_tokens(["<answer>", "</answer>"], special_tokens=special)
    function = matches(r"<answer>.*?</answer>")
    findings = found(judge([function, last_number], told(R1), own))
    assert [finding.part for finding in findings] == ["reward_funcs[0]"] * special
    assert all("'</answer>' and '<answer>' are special tokens" in finding.evidence for finding in findings)


ONE_LINE = "Answer in one line like this: <note> why </note><out> number </out>"
IDEA = "Write\n<idea>\n...\n</idea>\n<result>\n...\n</result>\n"


def boxed(completions, answer, **_):
    return [float(re.findall(r"\\boxed\{(.*?)\}", text(c))[-1:] == [right]) for c, right in zip(completions, answer)]


def half(completions, **_):
    scores = []
    for completion in completions:
        text(completion)
        scores.append(0.5)
    return scores


def by_prompt(completions, answer, **_):
    return [float(right) / 10 for _, right in zip([text(each) for each in completions], answer)]


def always_well(completions, **_):
    return [1.0 if text(completion) is not None else 0.0 for completion in completions]


@pytest.mark.parametrize("function", [ones, all_none, unknown_form])
def test_a_dead_function_beside_others_is_named_and_nothing_held_of_it(function, tokenizer):
    """A constant adds nothing to any advantage: no failure by itself, and never a clause inside of what held."""
    answers = judge([last_number, function], KINDS, tokenizer)
    (told,) = [answer for answer in answers if answer.verdict in (Verdict.FOUND, Verdict.NOT_CHECKED)]
    words = told.evidence if told.verdict is Verdict.FOUND else told.why
    assert f"{function.__name__} gives" in words and "last_number" not in words and told.part
    assert (told.verdict is Verdict.FOUND) is (function is all_none and not MASKED)
    assert not any(function.__name__ in answer.evidence for answer in answers if answer.verdict is Verdict.HELD)


@pytest.mark.parametrize("function", [nan_for_no_number, all_none, coding_alone])
def test_none_is_masked_by_the_releases_that_mask_it(function, tokenizer):
    """Releases 0.14 and 0.15 add NaN to the sum, and None is an error there; later ones leave both out."""
    assert bool(found(judge([function, last_number], KINDS, tokenizer))) is not MASKED


def above_the_mean(completions, answer, **_):
    """Pay the best of a call 1, and the mean 0."""
    paid = distance(completions, answer)
    return [value - sum(paid) / len(paid) for value in paid]


@pytest.mark.parametrize(
    ("function", "device", "held"),
    [
        (ranked, 1, False),
        (above_the_mean, 1, False),
        (above_the_mean, 4, True),  # a whole group
        (exact, 1, True),
        (distance, 1, True),
        (noisy, 1, True),
    ],
)
def test_a_function_is_called_with_as_many_completions_as_a_process_has(function, device, held, tokenizer, monkeypatch):
    """A rank of one completion is always the best."""
    monkeypatch.setattr(batch.cuts, "counts_prompts", lambda: False)
    given = training(function, processing_class=tokenizer)
    given.arguments.update(num_generations=4, per_device_train_batch_size=device, steps_per_generation=1)
    given.world_size = 4
    answers = list(judge_rewards(given))
    assert not [answer for answer in answers if answer.accuses]
    assert [answer.failure for answer in answers if answer.verdict is Verdict.HELD] == ["F10", "F14"] * held
    assert any("completions at a time" in note for note in given.rewards.notes) is (device < 4)


def in_each_other(completions, answer, **_):
    """An empty text is in every answer."""
    return [float(text(each).strip() in right or right in text(each)) for each, right in zip(completions, answer)]


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.01}, {"top_k": 1}, {"generation_kwargs": {"do_sample": False}}, {"repetition_penalty": 2.0}],
)
def test_how_tokens_are_drawn_accuses_nobody(asked, tokenizer):
    """F10 was said of each, and of small healthy scripts whose policy was sure of its answer."""
    given = training(exact, processing_class=tokenizer)
    given.arguments.update(asked)
    assert not [finding for finding in judge_rewards(given) if finding.accuses]


def flat(completions, **_):
    return [0.0] * len(completions)


def of_another_row(completions, answer, **_):
    """Pay by the answers from the middle of the batch on, as a process does that counts from another one's rows."""
    half = len(completions) // 2
    return exact(completions, [*answer[half:], *answer[:half]])


def catches_all(completions, **_):
    """As people run what a model has written: no made-up completion is a program."""
    paid = []
    for completion in completions:
        try:
            paid.append(float(eval(text(completion).strip()) == "no such value"))
        except Exception:
            paid.append(0.0)
    return paid


class PaysItself(trl.GRPOTrainer):
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        return None


@pytest.mark.parametrize(
    ("kind", "functions", "called", "accused"),
    [
        (trl.GRPOTrainer, [flat], {0}, ["F10"]),
        (PaysItself, [flat], set(), []),
        (PaysItself, [exact, flat], {0}, []),
    ],
)
def test_a_function_that_the_script_s_own_method_never_calls_is_not_accused(
    kind, functions, called, accused, tokenizer
):
    """F10 was SUSPECTED of a reward function that stood there because trl asks for one."""
    given = training(functions, processing_class=tokenizer)
    given.trainer.__class__ = kind
    given.finished, given.called, given.own = True, called, lambda file: file == __file__
    answers = list(judge_rewards(given))
    assert [finding.failure for finding in answers if finding.accuses] == accused
    assert accused or any(each.failure == "F14" and "training never called" in each.why for each in answers)


@pytest.mark.parametrize("name", ["_calculate_rewards", "_generate_and_score_completions", "log"])
def test_rewards_that_go_through_a_method_of_the_script_s_own_are_not_held(name, tokenizer):
    """An override that made them all equal had F10 HELD, by what the functions alone pay."""
    given = training([exact], processing_class=tokenizer)
    kind = type("Own", (type(given.trainer),), {name: lambda self, *args: None})
    given.trainer.__class__, given.own = kind, lambda file: file == __file__
    held = {each.failure for each in judge_rewards(given) if each.verdict is Verdict.HELD}
    assert held == ({"F10", "F14"} if name == "log" else set())


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
    from failurelab_preflight.stage.processes import Stopped

    raise Stopped("starts another process, python score.py")


@pytest.mark.parametrize(
    "function", [no_service, no_package, no_key, no_file, exits, dies, never_returns, other_process]
)
def test_what_is_not_here_is_no_failure(function, tokenizer, monkeypatch, in_forks):
    if function is never_returns:
        monkeypatch.setattr(asking, "LIMIT", 1.0)
    given = training([last_number, function], CHAT, processing_class=tokenizer)
    answers = list(judge_rewards(given))
    (answer,) = [answer for answer in answers if answer.verdict is Verdict.NOT_CHECKED]
    assert answer.failure == "F14" and function.__name__ in answer.why and not found(answers)


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

    answers = judge(busy, CHAT, tokenizer)
    assert any(answer.verdict is Verdict.HELD and answer.failure == "F14" for answer in answers)
    assert "scoring" not in "".join(capfd.readouterr()) and not (tmp_path / "rewards.log").exists()
    children = [int(path.name) for path in left.iterdir()]
    assert children and gone(children) == []


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


def as_number(completions, answer, **_):
    pairs = zip(map(text, completions), answer)
    return [float(said.strip().replace(".", "").isdigit() and float(said) == right) for said, right in pairs]


FLOATS = CHAT | {"answer": [7.0, 11.0, 17.0, 42.0]}


def cutting(completions, answer, **_):
    """Pay the first digit, and leave nothing else to whoever comes after."""
    for completion in completions:
        completion[0]["content"] = completion[0]["content"][:1]
    return [float(text(completion) == right[:1]) for completion, right in zip(completions, answer)]


def using_up(completions, answer, **_):
    return [float(text(completion) == answer.pop(0)) for completion in completions]


def cutting_copies(completions, answer, **kwargs):
    return cutting([[dict(completion[0])] for completion in completions], answer)


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


def test_how_often_a_function_that_is_well_is_called(tokenizer):
    """Once, once more twice for what it keeps from call to call, and once in the groups of the run."""
    calls = pathlib.Path(tempfile.mkdtemp()) / "calls"

    def paid(completions, answer, **_):
        with calls.open("a") as file:
            file.write("1")
        return exact(completions, answer)

    judge(paid, tokenizer=tokenizer)
    assert calls.read_text() == "1111"


def of_the_group(completions, answer, **_):
    own = exact(completions, answer)
    return [sum(own[at - at % 4 : at - at % 4 + 4]) / 4 for at in range(len(own))]


def above_its_group(completions, answer, **_):
    return [one - mean for one, mean in zip(exact(completions, answer), of_the_group(completions, answer))]


@pytest.mark.parametrize(("function", "verdict"), [(of_the_group, Verdict.FOUND), (above_its_group, Verdict.HELD)])
def test_a_function_is_asked_in_the_groups_of_the_run(function, verdict, tokenizer):
    (answer,) = [each for each in judge(function, tokenizer=tokenizer) if each.failure == "F10"][:1]
    assert answer.verdict is verdict


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


def test_forms_are_read_off_a_function():
    """Its tags and texts say how it wants an answer, also through a function that it calls."""

    def written(function):
        own = patterns.own_forms(signature.texts(function), signature.reads_json(function))
        return [patterns.fill(form, "42", "I add.") for form in own]

    assert "<reasoning>I add.</reasoning><result>42</result>" in written(tagged)
    assert "<answer>42</answer>" in written(unread_numbers)
    assert "<t>I add.</t>\n<a>42</a>" in written(matches(r"^<t>[\s\S]*?</t>\n<a>.*?</a>$"))
    assert any('"result": "42"' in form for form in written(json_reward("result")))
    assert not any("P<said>" in form or "<said>" in form for form in written(matches("So: (?P<said>.*)")))


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


def test_rewards_that_a_blind_question_tells_apart_do_not_hold(monkeypatch):
    """Whatever comes back as different: here the function that is planted differs."""
    monkeypatch.setattr("failurelab_preflight.rewards.survey.one_for_all", exact)
    answers = [answer for answer in judge(exact) if answer.failure == "F10"]
    assert [answer.verdict for answer in answers] == [Verdict.NOT_CHECKED] and "is not seen as equal" in answers[0].why


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


def by_hash(judge, prompts, completions):
    """Decide each pair, the same in both orders, by what has nothing to do with the answer."""
    return [int(zlib.crc32(two.encode()) > zlib.crc32(one.encode())) for one, two in completions]


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
        (of(-1), PLAIN, Verdict.SUSPECTED, "order"),
        (of(0.7), PLAIN, Verdict.FOUND, ""),
        (lambda judge, prompts, completions: [0], PLAIN, Verdict.FOUND, ""),
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


def test_a_judge_that_decides_by_something_else_does_not_hold():
    rows = datasets.Dataset.from_dict({"prompt": PLAIN["prompt"], "answer": PLAIN["answer"]})
    trainer = types.SimpleNamespace(judge=Judge(by_hash), reward_funcs=None)
    (answer,) = judge_preferences(Training(trainer, {}, dataset=rows))
    assert answer.verdict in (Verdict.NOT_CHECKED, Verdict.FOUND)


def own_reference(completions, answer, **_):
    return [float(right == text) for right, text in zip(answer, completions)]


def as_texts(completions, answer, **_):
    return [str(value) for value in own_reference(completions, answer)]


def first_of_batch(completions, answer, **_):
    return [float(text(completion) == answer[0]) for completion in completions]


@pytest.mark.parametrize(
    ("function", "mark", "fault", "verdict"),
    [
        (as_texts, "", "count", "FOUND"),
        (own_reference, "", "", "HELD"),
        (own_reference, "First add.\n#### ", "reference", "FOUND"),
        (first_of_batch, "", "", "NOT CHECKED"),
    ],
)
def test_what_looked_well_and_is_not(function, mark, fault, verdict):
    """Each was HELD: a text that reads as a number, a whole solution as the answer, and one row's answer for all."""
    rows = [{"prompt": text, "answer": mark + answer} for text, answer in zip(PLAIN["prompt"], PLAIN["answer"])]
    table = survey.survey([function], Inputs(rows, ["answer"]))
    (flag,) = [flag for flag in table.flags if flag.failure == "F14"]
    assert (fault, verdict) == (flag.fault, flag.verdict)


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


class Case:
    """What is said of reward functions, as `in_short` writes it; `options` are for `training`."""

    def __init__(self, said, functions, rows=PLAIN, template=None, keeps=False, **options):
        self.said, self.rows, self.template, self.keeps, self.options = said, rows, template, keeps, options
        self.functions = functions if isinstance(functions, list) else [functions]

    def __str__(self):
        return "-".join(getattr(function, "__name__", "scorer") for function in self.functions)


def in_short(answers):
    """Return verdicts: the failure and its fault, which function has it, whether an undo was tried, and if it ends."""
    lines = []
    for each in answers:
        fault, place = f":{each.fault}" * bool(each.fault), each.part.replace("reward_funcs[", " @").replace("]", "")
        undone = " tried" * bool(each.tried) + " ends" * each.ends
        lines.append(f"{each.verdict.value} {each.failure}{fault}{place}{undone}")
    return ", ".join(sorted(lines))


def raising(on, function):
    """Return the reward function with an error of its own for completions that `on` is true for."""

    def raises(completions, answer, **_):
        if any(on(text(completion), right) for completion, right in zip(completions, answer)):
            raise ValueError("not expected")
        return function(completions=completions, prompts=list(answer), answer=answer)

    return raises


def no_text(completions, answer, **_):
    if not all(map(text, completions)):
        raise RuntimeError("no text")
    return exact(completions, answer)


def asks_a_judge(completions, **_):
    return [no_service(completions) if text(completion) else 0.0 for completion in completions]


def tool_use(completions, **_):
    return [0.1 * any(message["role"] == "tool" for message in each) for each in completions]


def noise(scale):
    def noise(completions, **_):
        return [scale * random.random() for _ in completions]

    return noise


def compares(completions, answer, **_):
    return [float(text.strip() == str(right)) for text, right in zip(completions, answer)]


NUMBERS = PLAIN | {"answer": [7, 11, 17, 42]}
MISSING = PLAIN | {"answer": ["7", "11", None, "42"]}
LATER = {name: 48 * values for name, values in KINDS.items()}
R1_TAGS, XML_TAGS = r"^<think>.*?</think>\s*<answer>.*?</answer>$", r"^<reasoning>\n.*?n</reasoning>\n<answer>\n.*?\n"
IDEA_TAGS = r"^<idea>\n.+?\n</idea>\n<result>\n.+?\n</result>"
NOTE_TAGS = r"^<note>.*?</note>\s*<out>.*?</out>$"
WELL = "HELD F10, HELD F14"
FORM = "FOUND F14:form @0 tried, HELD F10"
WELL_BUT_1 = "HELD F10, HELD F14, NOT CHECKED F14 @1"
WELL_BUT_0 = "HELD F10, HELD F14, NOT CHECKED F14 @0"
REFERENCE = "FOUND F14:reference @0 tried"
SIGN = "FOUND F14:sign @0 tried, HELD F10"
UNKNOWN = "NOT CHECKED F14 @0"
CASES = [
    # The right answer gets more, in both forms of a dataset.
    Case(WELL, exact),
    *(Case(WELL, function, CHAT) for function in SOUND),
    # No form of a reference makes a function that strips it look dead.
    *(Case(WELL, last_number_bare, answers_as(write.format)) for write in ("${}$", "\\boxed{{{}}}", "{} cm")),
    # A reward for the reference's length gives right and wrong answers the same, whatever their type is.
    Case("HELD F10, NOT CHECKED F14 @0", as_long_as_the_answer, NUMBERS),
    # Without a reference nobody but its author knows whether it pays for what is wanted (TRL #2771).
    Case("HELD F10, NOT CHECKED F14 @0", shorter, CHAT),
    Case("HELD F10, NOT CHECKED F14 @0", one_line_wanted, CHAT),
    # What a function can never reward, and what was measured with that undone.
    Case("SUSPECTED F10:unread @0", ones),
    Case("SUSPECTED F10:unread @0", of_the_prompt),
    Case("SUSPECTED F10:unread @0", flat, CHAT),
    Case(UNKNOWN, catches_all, CHAT),
    Case("FOUND F14:chance @0, HELD F10", chance),
    Case("FOUND F10:one number @0 tried", one_number),
    Case("FOUND F10:batch @0 tried", mean_of_all),
    Case("FOUND F10:batch @0 tried", remembered_by_prompt, keeps=True),
    Case("FOUND F14:pairs @0 tried", of_another_row),
    Case("FOUND F14:count @0 ends", some),
    Case("FOUND F14:count @0 ends", nothing),
    Case(UNKNOWN, unread_numbers, WORDS),
    Case(REFERENCE, lower, WORDS),
    Case(REFERENCE, stripped, NUMBERS),
    Case("FOUND F14:reference @0 tried, HELD F10", stripped_and_short, NUMBERS),
    Case(UNKNOWN, compares, PLAIN | {"answer": [None] * 4}),
    Case(REFERENCE, last_number, answers_as("{} pages".format)),
    Case("FOUND F14:form @0 tried", messages_as_text, CHAT),
    Case("FOUND F14:form @0 tried", message_caught, CHAT),
    Case("FOUND F14:column @0 tried ends", another_column),
    Case("FOUND F14:column @0 tried ends", another_key),
    Case("FOUND F14:column @0 tried", another_key_got),
    Case("FOUND F14:keywords @0 tried ends", no_kwargs),
    Case(SIGN, errors_paid, CHAT),
    Case(SIGN, paid_for_wrong, CHAT),
    Case("FOUND F14:raises @0 tried ends, HELD F10, NOT CHECKED F14 @0", first_word),
    Case("FOUND F14:no number @0", infinite),
    Case(FORM, json_reward("result"), told('JSON only: {"solution": <number>}')),
    # An error for some completions hides nothing of what is given to the others. One of another type is the function's
    # own too. A service that is not here is asked in vain.
    Case("FOUND F14:raises @0 tried ends, HELD F10", raising(lambda said, right: not said, exact)),
    Case(
        "FOUND F10:batch @0 tried, FOUND F14:raises @0 tried ends", raising(lambda said, right: not said, mean_of_all)
    ),
    Case(
        "FOUND F14:raises @0 tried ends, FOUND F14:sign @0 tried, HELD F10",
        raising(lambda said, right: not said, errors_paid),
    ),
    Case(
        "FOUND F10:batch @0 tried, FOUND F14:raises @0 tried ends",
        raising(lambda said, right: right is None, mean_of_all),
        MISSING,
    ),
    Case("FOUND F14:raises @0 tried ends, HELD F10", no_text),
    Case(UNKNOWN, asks_a_judge),
    # A format that no completion has, beside a function that is well: open-r1 #237, and its n for a line break; and TRL
    # #6966, where the prompt ends with the tag.
    Case("FOUND F14:line breaks @0 tried, HELD F10", [matches(R1_TAGS.replace(r"\s*", "")), last_number], told(R1)),
    Case(WELL_BUT_0, [matches(R1_TAGS, re.S), last_number], told(R1)),
    Case(WELL_BUT_0, [matches(XML_TAGS + r"</answer>\s*$", re.S), last_number], told(XML)),
    Case(
        WELL_BUT_0,
        [matches(XML_TAGS.replace("?n<", r"?\n<") + r"</answer>\s*$", re.S), last_number],
        told(XML),
    ),
    Case(FORM, [matches(r"^<think>.*?</think>", re.S), last_number], CHAT, OPENED),
    Case(WELL_BUT_0, [matches(r"^(<think>)?.*?</think>", re.S), last_number], CHAT, OPENED),
    # A form that the prompt shows is to be paid; the same words laid out otherwise are another form.
    Case("HELD F10, NOT CHECKED F14 @0", matches(NOTE_TAGS), told(ONE_LINE)),
    Case("FOUND F14:line breaks @0 tried, HELD F10", matches(NOTE_TAGS), told(ONE_LINE.replace("in one line ", ""))),
    Case("HELD F10, NOT CHECKED F14 @0", matches(IDEA_TAGS + r"\s*$", re.S), told(IDEA)),
    Case(FORM, matches(r"^<idea>.*?</idea><result>.*?</result>\s*$", re.S), told(IDEA)),
    Case("FOUND F14:form @0 tried", in_both, told("Write <answer>it</answer>.")),
    Case(WELL_BUT_1, [exact, ended], CHAT),
    Case(WELL, as_number, FLOATS),
    # A fenced block: not where it is a part of the question.
    Case(WELL, sql_block, told(QUERY)),
    Case(WELL, last_block, told(QUERY)),
    Case(FORM, boxed, told(QUERY)),
    Case(WELL, boxed, told("Box the answer. Given is this code:\n```python\nprint(3)\n```")),
    Case(WELL, in_plain_text, told("Write one sql query, in plain text.")),
    # A constant, and a form that nobody thought of.
    Case("SUSPECTED F10 @0", half),
    Case("HELD F10, HELD F14, NOT CHECKED F10 @0", [half, exact]),
    Case(UNKNOWN, unknown_form),
    Case(WELL_BUT_0, [unknown_form, exact]),
    Case(UNKNOWN, tool_use, CHAT),
    Case("SUSPECTED F10 @0", by_prompt, CHAT),
    Case("SUSPECTED F10 @0", always_well, CHAT),
    Case("HELD F10, SUSPECTED F14", in_each_other),
    # Chance that breaks ties, and chance that drowns the others.
    Case(WELL_BUT_0, [noise(1e-3), exact]),
    Case("FOUND F14:chance @0, HELD F10", [noise(1.0), exact]),
    # Every second row is of one kind: rows that are looked at in even steps would all be of the other.
    Case(WELL_BUT_1, [last_number, coding_alone], LATER),
    # Weights. Nobody may have asked for right answers, as of a tutor who must not tell. A penalty that others outweigh
    # is no wrong sign. A weight of 0 beside another that asks is odd and no more.
    Case("FOUND F10, NOT CHECKED F14 @1", [exact, exact], reward_weights=[1.0, -1.0]),
    Case("FOUND F10", [exact, distance], reward_weights=[0.0, 0.0]),
    Case(SIGN, [exact], reward_weights=[-1.0]),
    Case("HELD F10, NOT CHECKED F14 @0, NOT CHECKED F14 @1", [exact, shorter], reward_weights=[-1.0, 1.0]),
    Case(WELL_BUT_1, [exact, penalty_for_answer_alone]),
    Case("HELD F10, NOT CHECKED F14 @0, NOT CHECKED F14 @1", [unknown_form, penalty_for_answer_alone]),
    Case(WELL_BUT_1, [last_number, in_reasoning], reward_weights=[1.0, -1.0]),
    Case("FOUND F14 tried, HELD F10, NOT CHECKED F14 @1", [exact, shorter], reward_weights=[0.0, 1.0]),
    Case(WELL, [exact, distance], reward_weights=[0.0, 1.0]),
    # Lab 32: what is below 0 already, and is turned by its weight once more, pays for being far off.
    Case("FOUND F14:sign @1 tried, HELD F10", [exact, distance], reward_weights=[1.0, -0.1]),
    Case(WELL_BUT_1, [exact, distance], reward_weights=[1.0, -0.001]),
    Case(WELL, [exact, distance], reward_weights=[1.0, 0.1]),
    Case(WELL, [exact, miss], reward_weights=[1.0, -1.0]),
    Case("FOUND F14:sign @1 tried, HELD F10", [exact, miss], reward_weights=[1.0, 1.0]),
    # Beside a reward for short completions that outweighs it a right answer is told from a wrong one, and no more.
    Case("HELD F10, NOT CHECKED F14, NOT CHECKED F14 @1", [exact, shorter], reward_weights=[1.0, 1.0]),
    Case(WELL_BUT_1, [exact, shorter], reward_weights=[1.0, 0.001]),
    # What a function leaves to those after it, which get the same lists, and what it keeps from call to call.
    Case("HELD F10, SUSPECTED F14:in place @0", [cutting, exact], CHAT),
    Case("HELD F10, SUSPECTED F14:in place @1", [exact, using_up, exact], CHAT),
    Case(WELL, [exact, cutting], CHAT),
    Case(WELL, [cutting_copies, exact], CHAT),
    Case("SUSPECTED F14:memory @0", remembering(set())),
    Case(WELL, counting),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_said_of_reward_functions(case, tokenizer):
    """Each kind of function that people write, in a line of verdicts; words are the goldens'."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = case.template or own.chat_template
    assert in_short(judge(case.functions, case.rows, own, **case.options)) == case.said
