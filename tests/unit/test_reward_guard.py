"""RewardGuard: which of three causes makes rewards equal, what a function never gets, and silence for healthy runs."""

import asyncio
import logging

import pytest
import torch
from small import said

from failurelab import guards
from failurelab.guards.reward import CAUSES

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
        (lambda completions, solution=None, **_: [0.0, 1.0, 0.0, 1.0], "asks for solution, which never arrives"),
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
        lambda completions, **_: [1.0 / (completions[0] == "2")] * 4,  # no other completion is taken
    ],
)
def test_what_the_guard_fails_at_never_ends_the_run(function):
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
