"""Rewards that differ, for the cut training: those of a small random model are all alike.

Equal rewards leave no gradient to look at. So the trainer gets others, and the script's own functions are asked
afterwards, in processes of their own (`failurelab_preflight.rewards.asking`).
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from failurelab.textbook.ranks import own_number
from failurelab_preflight.rewards import signature
from failurelab_preflight.training import Training


@contextlib.contextmanager
def differing_rewards(training: Training) -> Iterator[None]:
    """Inside, the trainer's reward functions and reward models give rewards that differ."""
    functions = getattr(training.trainer, "reward_funcs", None)
    if not isinstance(functions, list):
        yield
        return
    own, generations = list(functions), int(getattr(training.trainer, "num_generations", 0) or 2)
    with contextlib.ExitStack() as stack:
        stack.callback(functions.__setitem__, slice(None), own)
        functions[:] = [_stand_in(function, training, generations, number) for number, function in enumerate(own)]
        for number, function in enumerate(own):
            if isinstance(function, torch.nn.Module):
                hook = functools.partial(_vary, generations, number)
                stack.enter_context(function.register_forward_hook(hook))
        yield


def _stand_in(function: Any, training: Training, generations: int, number: int) -> Any:
    """Return a reward function that notes what it is handed at its first call, and gives rewards that differ."""
    if isinstance(function, torch.nn.Module) or not callable(function):
        return function

    calls = itertools.count()

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((each.name for each in signature.parameters(function)), args)) | kwargs
        training.called.add(number)
        if "completions" not in given:  # by a trainer of another kind: what it takes is known to the function alone
            rewards = function(*args, **kwargs)
            if not isinstance(rewards, list):
                return rewards
            return substitute_rewards(len(rewards), generations, number, own_number())
        if training.reward_inputs is None:
            training.reward_inputs = given
        if training.flat:
            return [0.0] * len(given["completions"])
        rewards = substitute_rewards(len(given["completions"]), generations, number, own_number())
        # Turned at every second call, so that losses lie on both sides of zero.
        sign = -1 if next(calls) % 2 else 1
        return [sign * reward for reward in _same_for_same(rewards, given, generations)]

    stand_in.__name__ = getattr(function, "__name__", type(function).__name__)
    return stand_in


def _same_for_same(rewards: list[float], given: dict[str, Any], generations: int) -> list[float]:
    """Give equal completions of a prompt one reward, as functions do: which of them is trained on cannot be seen.

    Where all completions of each prompt are equal, rewards stay as they are, for there would be no gradient.
    """
    keys = [(place // generations, repr(each)) for place, each in enumerate(given["completions"])]
    first: dict[tuple[int, str], float] = {}
    same = [first.setdefault(key, reward) for key, reward in zip(keys, rewards)]
    return same if len(first) > len({group for group, _ in first}) else rewards


def _vary(generations: int, number: int, module: Callable[..., Any], args: tuple, output: Any) -> Any:
    """Let a reward model, which is small and random, give rewards that differ: logits (completions, 1)."""
    if isinstance(getattr(output, "logits", None), torch.Tensor):
        values = substitute_rewards(len(output.logits), generations, number, own_number())
        output.logits = output.logits.new_tensor(values)[:, None].expand_as(output.logits)
    return output


def substitute_rewards(count: int, generations: int, function: int, rank: int = 0) -> list[float]:
    """Return rewards that differ by row, by group and by reward function, for up to eight functions, and by rank.

    In no group do they read backwards as they do with the other sign: two mistakes would look alike then. On ranks with
    groups of their own every second one has them in the other order: pairs have the same advantages else.
    """
    places = [
        divmod(index, generations) for index in range(rank * count, (rank + 1) * count)
    ]  # group, row of the group
    if rank % 2 and count % generations == 0:
        places = [(group, generations - 1 - row) for group, row in places]
    return [((3 + 7 * function) * row**2 + 7 * function + 5 * group) % 11 / 8 + group / 16 for group, row in places]
