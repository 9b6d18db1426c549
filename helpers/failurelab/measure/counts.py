"""Figures that are counted, by the names of figures.toml: rewards, groups, prompts, ends."""

import math
from collections.abc import Sequence, Set
from typing import Any

from failurelab.failures.predicates import Value

Ids = Sequence[Sequence[int]]


def of_rewards(groups: Sequence[Sequence[float | None]]) -> dict[str, int]:
    """Count groups whose rewards are equal, and rewards that are no finite number; None is one."""
    paid = [reward for group in groups for reward in group]
    return {
        "groups": len(groups),
        "flat_groups": sum(len(set(group)) == 1 for group in groups),
        "rewards_paid": len(paid),
        "rewards_invalid": sum(reward is None or not math.isfinite(reward) for reward in paid),
    }


def of_draws(groups: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Count groups of completions that were drawn, as ids or texts, and those whose completions are all the same."""
    return {
        "groups_drawn": len(groups),
        "groups_alike": sum(all(each == group[0] for each in group) for group in groups),
    }


def of_groups(prompts: Sequence[Any], size: int) -> dict[str, Value]:
    """Divide the prompts of a batch's completions, in their order, into groups."""
    groups = [set(map(repr, prompts[at : at + size])) for at in range(0, len(prompts) - size + 1, size)]
    return {
        "completions_a_group": size,
        "completions_left_over": len(prompts) % size,
        "groups": len(groups),
        "groups_mixed": sum(len(group) > 1 for group in groups),
    }


def of_completions(completions: Ids, drawn: Set[int], known: Set[int], limit: int) -> dict[str, Value]:
    """Count ends: those that the policy draws, and those of them that the trainer knows.

    Args:
        completions: their ids.
        drawn: ids that end a turn of the policy's.
        known: ids that the trainer takes for an end.
        limit: the most tokens of a completion.
    """
    ends = [id for row in completions for id in row if id in drawn]
    return {
        "rollouts": len(completions),
        "clipped": sum(len(row) >= limit and known.isdisjoint(row) for row in completions) / max(1, len(completions)),
        "ends_drawn": len(ends),
        "ends_not_seen": sum(id not in known for id in ends),
    }


def of_texts(prompts: Sequence[str], mark: str) -> dict[str, Value]:
    """Count prompts without the mark of a chat template."""
    lengths = len(set(map(len, prompts)))
    return {"prompt_lengths": lengths, "prompts_without_template": sum(mark not in text for text in prompts)}
