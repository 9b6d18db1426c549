"""RewardGuard: rewards that are equal, or no numbers, and silence for healthy runs."""

import asyncio
import functools
import json
import logging

import pytest
import torch
from small import said

from failurelab import guards

PROMPTS = ["1+1=", "1+1=", "2+2=", "2+2="]
ANSWERS = ["2", "2", "4", "4"]
WRONG, RIGHT = ["no", "nope"] * 2, ["2", " 2", "4", " 4"]


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
    ("function", "completions", "told"),
    [
        (right, WRONG, "reward_funcs[0] right gives 0."),
        (right, RIGHT, "reward_funcs[0] right gives 1."),
        (right, [*RIGHT[:2], *WRONG[2:]], "reward_funcs[0] right gives 0 to 1."),
        (right, ["no"] * 4, "all completions of a prompt are the same text"),
        (constant(0.5), WRONG, "gives 0.5."),
        (slow, WRONG, "gives 0."),
        ([constant(0.0), right, functools.partial(constant(1.0))], WRONG, "reward_funcs[1] right gives 0; "),
    ],
)
def test_rewards_that_are_equal_in_each_group_are_told_once(function, completions, told):
    guard, messages = run(function, [completions] * 3)
    assert guard.report.flat == guard.report.groups == 6
    assert len(messages) == 1 and told in messages[0] and guard.report.problem in messages[0]


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
    assert messages == [] and guard.report.problem == ""
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


def test_a_weight_of_zero_takes_a_function_out():
    """What each function pays is told beside: the flat curve alone does not say which one counts."""
    weights = torch.tensor([0.0, 1.0])
    guard, messages = run([right, constant(1.0)], [["2", "no", "4", "no"]] * 3, reward_weights=weights)
    assert guard.report.flat == 6 and len(messages) == 1 and "reward_funcs[0] right gives 0 to 1" in messages[0]


def test_it_stops_where_it_was_asked_to():
    with pytest.raises(guards.GuardTripped, match="RewardGuard: in 2 of 2 groups all rewards are equal") as stopped:
        run(right, [WRONG] * 3, action="stop")
    assert stopped.value.report.flat == 2
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


def test_a_call_by_place_is_read_as_one_by_name():
    """A trainer of one's own may call `reward(prompts, completions, answer=...)`."""
    trainer = Trainer(reward_funcs=[right])
    guard = guards.RewardGuard(trainer, "stop", groups=9)
    guard.on_train_begin(None, None, None)
    trainer.reward_funcs[0](PROMPTS, ["2", "no", "4", "no"], answer=ANSWERS)
    assert guard.report.groups == 2 and not guard.report.problem


def test_a_function_that_pays_every_completion_alike_is_named_where_rewards_differ(caplog):
    """A form that all completions have is healthy, so it accuses nobody."""
    with caplog.at_level(logging.INFO, logger="failurelab.guards"):
        guard, messages = run([constant(0.5), right], [["2", "no", "4", "no"]] * 5)
    assert messages == [] and len(guard.report.constant) == 1
    assert guard.report.constant[0] in caplog.text


def test_what_was_not_asked_is_not_held(tmp_path):
    """Whether right answers get more than wrong ones is F14's, which the rewards of a run do not show."""
    trainer = Trainer(reward_funcs=[right])
    guard = guards.RewardGuard(trainer, groups=2)
    state = Trainer(is_world_process_zero=True)
    guard.on_train_begin(Trainer(output_dir=tmp_path), state, None)
    trainer.reward_funcs[0](prompts=PROMPTS, completions=["2", "no", "4", "no"], answer=ANSWERS)
    guard.on_train_end(None, state, None)
    (notice,) = json.loads((tmp_path / "failurelab.json").read_text())["notices"]
    assert (notice["kind"], notice["failures"]) == ("held", ["F10"])
