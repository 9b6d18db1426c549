"""Rewards that hang on the other completions of a call, where no call holds a whole group.

A rank, a vote or a mean of the batch needs the completions that it compares. Each process hands its own ones alone to a
reward function, which may be a part of a group: then a rank is one among few, and of a single completion always the
best.

Upstream: TRL #3896.
"""

from failurelab.rewards import figures
from failurelab.rewards.examination import Examination
from failurelab.rewards.figures import SAME
from failurelab.rewards.forms import Completion
from failurelab.rewards.table import Flag

_MOST = 6  # completions that are asked about


def judge(x: Examination) -> Flag | None:
    """Ask about completions of one prompt in one call, and in calls as large as a process makes them.

    A function whose rewards change with the order is left alone: it draws random numbers, or goes by places.
    """
    some = _apart(x)
    if not x.part or not some:
        return None
    together, turned = x.ask(some).values, x.ask(some[::-1]).values[::-1]
    if len(together) != len(some) or not _same(together, turned):
        return None
    parts = [some[place : place + x.part] for place in range(0, len(some), x.part)]
    apart = [value for part in parts for value in x.ask(part).values]
    if len(apart) != len(some) or _same(together, apart):
        return None
    said = (
        f"{x.key} compares the completions of a call with each other, and a call has {x.part} of the {x.group} of a "
        f"group: a process hands over only its own. {len(some)} completions of one prompt get {figures.span(together)} "
        f"in one call (as in the table), and {figures.span(apart)} in calls of {x.part}"
    )
    repair = (
        f"Set per_device_train_batch_size to num_generations ({x.group}): then each process has one whole group. A "
        "larger multiple puts several prompts into a call, which a comparison has to keep apart."
    )
    if len(set(apart)) > 1:
        why = "the rewards still differ; what a comparison within a part of a group is worth only a run tells"
        return Flag(x.key, "F14", "SUSPECTED", said, repair, control=why, fault="call")
    tried = f"in one call of a whole group they get {figures.span(together)}"
    fix = ("arguments", {"per_device_train_batch_size": x.group}, {"per_device_train_batch_size": "num_generations"})
    said += f": all get the same, so {'every advantage is 0' if x.alone else 'it adds nothing to any advantage'}"
    return x.found("call", said, repair, tried, fix=fix)


def _apart(x: Examination) -> list[Completion]:
    """Return some completions of one prompt that got different rewards in one call; none where all got the same."""
    for row in dict.fromkeys(each.row for each in x.completions):
        by_reward = {value: each for each, value in zip(x.completions, x.rewards) if each.row == row}
        if len(by_reward) > 1:
            return list(by_reward.values())[:_MOST]
    return []


def _same(values: figures.Rewards, others: figures.Rewards) -> bool:
    return len(values) == len(others) and all(
        value == other or (value is not None and other is not None and abs(value - other) <= SAME)
        for value, other in zip(values, others)
    )
