"""RewardGuard: which of three causes makes rewards equal, what a function never gets, and silence for healthy runs."""

import asyncio
import functools
import logging
import re
import threading
import time

import pytest
import torch
from injected import grpo
from small import said

from failurelab import guards
from failurelab.guards.reward import CAUSES
from failurelab.handles import listen_to
from failurelab_course.experiments import models

PROMPTS = ["1+1=", "1+1=", "2+2=", "2+2="]
ANSWERS = ["2", "2", "4", "4"]
WRONG, RIGHT = ["no", "nope"] * 2, ["2", " 2", "4", " 4"]
CONVERSATION = [[{"role": "assistant", "content": text}] for text in WRONG]


class Trainer:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def right(prompts, completions, answer, **_):
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]


def constant(value):
    return lambda prompts, completions, **_: [value] * len(completions)


async def slow(completions, **_):
    return [0.0] * len(completions)


def run(function, batches, *, action="warn", groups=2, **attributes):
    """Give a guard the batches as a trainer would; return the guard, and the messages of its warnings."""
    functions = function if isinstance(function, list) else [function]
    trainer = Trainer(reward_funcs=list(functions), **attributes)
    guard = guards.RewardGuard(trainer, action, groups=groups)
    with said() as messages:
        guard.on_train_begin(None, None, None)
        for completions in batches:
            for listened in list(trainer.reward_funcs):
                rewards = listened(prompts=PROMPTS, completions=completions, answer=ANSWERS)
                if asyncio.iscoroutine(rewards):
                    asyncio.run(rewards)
        guard.on_train_end(None, None, None)
    assert trainer.reward_funcs == functions  # put back as they were
    return guard, messages


@pytest.mark.parametrize(
    ("function", "completions", "cause"),
    [
        (right, WRONG, "floor"),
        (right, RIGHT, "ceiling"),
        (right, [*RIGHT[:2], *WRONG[2:]], "mixed"),
        (right, ["no"] * 4, "same"),
        (constant(0.0), WRONG, "constant"),
        (lambda completions, **_: [float(len(text) > 9) for text in completions], WRONG, "floor"),
        (lambda completions, **_: [9.0 - len(text) // 99 for text in completions], RIGHT, "ceiling"),
        (lambda completions, **_: [float(text in WRONG) + 1 for text in completions], WRONG, "unknown"),
        (slow, WRONG, "unknown"),  # a coroutine is awaited, and not asked again
        (
            lambda prompts, completions, **_: [float(len(prompt) + ord(prompt[0])) for prompt in prompts],
            WRONG,
            "constant",
        ),
        (
            lambda completions, answer, **_: [float(c[0]["content"] == a) for c, a in zip(completions, answer)],
            CONVERSATION,
            "floor",
        ),
    ],
)
def test_equal_rewards_and_which_of_the_causes_it_is(function, completions, cause):
    """They look alike in every log; other completions tell them apart."""
    guard, messages = run(function, [completions] * 3)
    assert guard.report.cause == cause and guard.report.flat == guard.report.groups == 6
    assert len(messages) == 1 and CAUSES[cause] in messages[0]


@pytest.mark.parametrize(
    "batches",
    [
        [["2", "no", "no", "no"]] * 5,  # one of two groups is flat in each batch
        [["no"] * 4, ["2", "no", "4", "no"], ["no"] * 4],  # flat batches, but not groups in a row
        [["no"] * 4],  # too few to judge
    ],
)
def test_a_run_with_some_flat_groups_is_left_alone(batches, caplog):
    """And one of several tasks: trl takes None for "not my task"; only what nobody rewards is told."""
    with caplog.at_level(logging.INFO, logger="failurelab.guards"):
        guard, messages = run(right, batches, groups=3)
    assert messages == [] and guard.report.cause == ""
    tasks = [lambda completions, **_: [None, None, 1.0, 0.0], lambda completions, **_: [1.0, 0.0, None, None]]
    guard, messages = run(tasks, [ANSWERS] * 2, reward_weights=torch.tensor([1.0, 0.5]))
    assert messages == [] and guard.report.groups == 4
    assert "groups had equal rewards" in caplog.text and "right answers get more than wrong ones was not" in caplog.text


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions, **_: [float("nan")] * 4, "gives nan for 4 of 4 completions"),
        (lambda completions, **_: [None, 1.0, 0.0, 1.0], "no function gives a reward for 1 of 4 completions"),
    ],
)
def test_what_else_is_wrong_with_rewards(function, message):
    guard, messages = run(function, [ANSWERS] * 2)
    assert len(messages) == 1 and message in messages[0] and message in guard.report.problem


def test_a_missing_column_is_named_before_python_complains():
    trainer = Trainer(reward_funcs=[lambda completions, solution, **_: [0.0] * 4])
    guard = guards.RewardGuard(trainer)
    guard.on_train_begin(None, None, None)
    with pytest.raises(TypeError), pytest.warns(guards.GuardWarning, match="asks for solution, which never arrives"):
        trainer.reward_funcs[0](prompts=PROMPTS, completions=ANSWERS)


def test_it_stops_where_it_was_asked_to():
    with pytest.raises(guards.GuardTripped, match="RewardGuard: the rewards of each of the last 2 groups") as stopped:
        run(right, [WRONG] * 3, action="stop")
    assert stopped.value.report.cause == "floor"
    with pytest.raises(ValueError, match="groups=0"):
        guards.RewardGuard(None, groups=0)


class Unreadable(list):
    def __iter__(self):
        raise RuntimeError("read once only")


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, **_: Unreadable([1.0]),  # rewards that cannot be read
        lambda completions, **_: ["good"] * 4,  # or are no numbers
    ],
)
def test_what_the_guard_fails_at_never_ends_the_run(function, own_errors_are_told):
    """The run goes on, and it is said that nothing was judged."""
    _, messages = run(function, [RIGHT] * 3)
    assert messages and all("could not check: " in message for message in messages)
    assert len(messages) == len(set(messages))


@pytest.mark.parametrize("attributes", [{"reward_funcs": None}, {"reward_funcs": [torch.nn.Linear(1, 1)]}, {}])
def test_a_trainer_without_reward_functions_is_told(attributes):
    trainer = Trainer(**attributes)
    guard = guards.RewardGuard(trainer)
    with pytest.warns(guards.GuardWarning, match="could not check: the trainer has no reward functions"):
        guard.on_train_begin(None, None, None)


def test_what_it_asks_leaves_the_random_state_alone():
    def noisy(completions, **_):
        torch.rand(3)
        return [0.0] * len(completions)

    states = []
    for groups in (2, 100):
        torch.manual_seed(0)
        run(noisy, [WRONG] * 2, groups=groups)
        states.append(torch.rand(1))
    assert states[0] == states[1]


def with_a_default(completions, answer, tolerance=1e-3, **_):
    return right(PROMPTS, completions, answer)


@functools.wraps(with_a_default)
def decorated(*args, **kwargs):
    return with_a_default(*args, **kwargs)


def gives_a_column(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, level=3, **kwargs)

    return call


@gives_a_column
def decorated_with_a_column(completions, answer, level, **_):
    return right(PROMPTS, completions, answer)


class Judge:
    def __init__(self):
        self.scale = 1.0

    def __call__(self, completions, answer, rounding=2, **_):
        return right(PROMPTS, completions, answer)

    def judge(self, completions, answer, *, log=None, **_):
        return right(PROMPTS, completions, answer)


def environment_reward(environments, _env_type=dict, **_):
    """As trl 1.16 makes it for an environment with a `get_reward`."""
    return [each["reward"] for each in environments]


@pytest.mark.parametrize(
    "function",
    [
        with_a_default,
        decorated,
        decorated_with_a_column,
        functools.partial(lambda scale, completions, answer, **_: right(PROMPTS, completions, answer), 2.0),
        functools.partial(lambda completions, answer, scale, **_: right(PROMPTS, completions, answer), scale=2.0),
        Judge(),
        Judge().judge,
        lambda completions, answer, solution=None, **_: right(PROMPTS, completions, answer),
        lambda prompts, completions, answer, trainer_state, log_extra, log_metric, **_: right(
            prompts, completions, answer
        ),
        environment_reward,
    ],
    ids=[
        "default", "decorated", "column of a decorator", "partial", "keyword of a partial", "object", "method",
        "no solution", "all of trl's", "environment",
    ],
)  # fmt: skip
def test_an_argument_with_a_default_is_no_column(function):
    """A run in which nothing is wrong was stopped, because no column has the name of an option."""
    trainer = Trainer(reward_funcs=[function])
    guard = guards.RewardGuard(trainer, "stop", groups=2)
    guard.on_train_begin(None, None, None)
    more = {"trainer_state": None, "log_extra": print, "log_metric": print, "environments": [{"reward": 1.0}, {}] * 2}
    more["environments"] = [{"reward": float(number)} for number in range(4)]
    for _ in range(3):
        rewards = trainer.reward_funcs[0](prompts=PROMPTS, completions=["2", "no", "4", "no"], answer=ANSWERS, **more)
        assert len(list(rewards)) == 4
    guard.on_train_end(None, None, None)
    assert not guard.report.problem and guard.report.groups == 6


def test_a_call_by_place_is_read_as_one_by_name():
    """A trainer of one's own may call `reward(prompts, completions, answer=...)`."""
    trainer = Trainer(reward_funcs=[right])
    guard = guards.RewardGuard(trainer, "stop", groups=9)
    guard.on_train_begin(None, None, None)
    trainer.reward_funcs[0](PROMPTS, ["2", "no", "4", "no"], answer=ANSWERS)
    assert guard.report.groups == 2 and not guard.report.problem


def test_a_reference_with_a_default_that_no_column_gives_is_named_where_rewards_are_equal():
    """`solution=None` where the column is `answer`: an option, until nothing is ever right."""
    _, messages = run(lambda completions, solution=None, **_: [float(c == solution) for c in completions], [WRONG] * 3)
    assert len(messages) == 1 and "no column is named solution" in messages[0]


def raises_on_nothing(completions, answer, **_):
    return [float(text.split()[0] == wanted) for text, wanted in zip(completions, answer)]


def raises_without_a_tag(completions, answer, **_):
    return [float(re.search("<answer>(.*)</answer>", text)[1] == "?") for text in completions]


@pytest.mark.parametrize(
    ("function", "cause", "error"),
    [(raises_on_nothing, "floor", "IndexError"), (raises_without_a_tag, "unknown", "TypeError")],
)
def test_a_completion_that_a_function_does_not_take_hides_no_other(function, cause, error):
    """What raises an error on "" was asked again with each batch, and that all rewards are equal was never told."""
    answered = [f"<answer>{text}</answer> {number}" for number, text in enumerate(WRONG)]
    guard, messages = run(function, [answered] * 9)
    assert len(messages) == 1 and guard.report.cause == cause
    assert "it raises an error" in messages[0] and error in messages[0]
    (report,) = guard.report.functions
    assert 0 < report.raised < report.asked


def test_what_a_function_keeps_is_as_it_was():
    """It is asked in a fork, and what each paid is a table of the report."""
    calls = []

    def counts(completions, **_):
        calls.append(completions)
        return [0.0] * len(completions)

    guard, _ = run(counts, [WRONG] * 3)
    assert calls == [WRONG] * 3
    table = guard.report.table
    assert table.functions == ["reward_funcs[0] counts"] and {line.rewards[0] for line in table.lines} == {0.0}


def test_a_function_that_takes_long_is_asked_no_more(monkeypatch):
    """Some call a service: the made-up completions may cost no more than a few batches."""
    monkeypatch.setattr("failurelab.guards.reward._SECONDS", 0.5)

    def hangs_if_asked(completions, **_):
        while completions != WRONG:
            time.sleep(0.01)
        return [0.0] * len(completions)

    guard, messages = run(hangs_if_asked, [WRONG] * 9)
    assert len(messages) == 1 and guard.report.cause == "unknown" and "did not return within" in messages[0]


def test_it_asks_a_function_and_none_of_its_listeners():
    """StepGuard listens to the same functions, and made-up completions are none of the run's."""
    trainer, heard = Trainer(reward_funcs=[constant(0.0)]), []
    guard = guards.RewardGuard(trainer, groups=2)
    with listen_to(trainer.reward_funcs, lambda *_: None, lambda *told: heard.append(told)), said() as messages:
        guard.on_train_begin(None, None, None)
        for _ in range(3):
            trainer.reward_funcs[0](prompts=PROMPTS, completions=WRONG, answer=ANSWERS)
    assert len(messages) == 1 and len(heard) == 3


def test_functions_that_read_the_environments_are_not_asked():
    """What an environment gives depends on what was done in it, and not on a text; nor can it be copied always."""
    calls = []

    def reward(environments, **_):
        calls.append(environments)
        return [0.0] * 4

    trainer = Trainer(reward_funcs=[reward])
    guard = guards.RewardGuard(trainer, groups=2)
    with said() as messages:
        guard.on_train_begin(None, None, None)
        for _ in range(3):
            trainer.reward_funcs[0](prompts=PROMPTS, completions=WRONG, environments=[threading.Lock()] * 4)
    assert len(messages) == 1 and guard.report.cause == "unknown" and len(calls) == 3


def test_functions_that_read_what_was_drawn_beside_the_completions_are_not_asked():
    """`final`, which a rollout function hands on, no made-up completion has: the function looked like a constant."""

    def reward(completions, final, answer, **_):
        return [float(last == right) for last, right in zip(final, answer)]

    trainer = Trainer(reward_funcs=[reward])
    guard = guards.RewardGuard(trainer, groups=2)
    with said() as messages:
        guard.on_train_begin(None, None, None)
        for _ in range(3):
            trainer.reward_funcs[0](prompts=PROMPTS, completions=WRONG, final=["3", "5"] * 2, answer=ANSWERS)
    assert len(messages) == 1 and guard.report.cause == "unknown"


def test_functions_of_one_name_are_told_apart():
    def named(value):
        def accuracy(completions, **_):
            return [value] * len(completions)

        return accuracy

    guard, messages = run([named(0.0), right, functools.partial(named(1.0))], [WRONG] * 3)
    first, other, second = (report.name for report in guard.report.functions)
    assert len({first, other, second}) == 3 and "reward_funcs[0]" in first and "reward_funcs[2]" in second
    assert first in messages[0] and second in messages[0] and other == "reward_funcs[1] right"


@pytest.mark.parametrize("kind", [functools.partial(slow), type("Slow", (), {"__call__": staticmethod(slow)})()])
def test_what_is_awaited_is_not_asked_again(kind):
    """A partial of a coroutine function, and an object whose `__call__` is one."""
    guard, messages = run(kind, [WRONG] * 3)
    assert guard.report.cause == "unknown" and len(messages) == 1 and "awaited" in messages[0]


def by_text(completions):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def once(completions, **_):
    yield from by_text(completions)


async def awaited(completions, **_):
    return map(float, by_text(completions))


@pytest.mark.parametrize("reward", [once, awaited])
def test_a_run_under_guards_trains_to_the_weights_of_one_without(reward):
    """A generator of rewards arrived empty at the trainer, and ended the run."""
    weights = []
    for make in ((), (guards.RewardGuard, guards.StepGuard)):
        torch.manual_seed(0)
        trainer = grpo(*models.load("tiny"), reward=reward, temperature=2.0)
        own = [kind(trainer, "stop") for kind in make]
        for guard in own:
            trainer.add_callback(guard)
        trainer.train()
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights))
    assert not all(torch.equal(*pair) for pair in zip(weights[0], models.load("tiny")[0].parameters()))
    assert own[0].report.groups and own[1].report.verdict == "HELD"
