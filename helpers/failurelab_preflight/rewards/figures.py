"""What rewards of made-up completions say: equal or not, right above wrong or not."""

from collections.abc import Sequence

from failurelab_preflight.rewards.forms import NO_ANSWER, Completion

SAME = 1e-9
Rewards = Sequence[float | None]
Pair = tuple[float, float, int]
Pairs = tuple[list[Pair], list[Pair]]


def is_flat(completions: Sequence[Completion], rewards: Rewards) -> bool:
    """Return whether all completions of each prompt got the same."""
    groups: dict[int, set[float | None]] = {}
    for completion, reward in zip(completions, rewards):
        groups.setdefault(completion.row, set()).add(reward)
    return all(len(group) == 1 for group in groups.values())


def compare_pairs(completions: Sequence[Completion], rewards: Rewards, sign: int = 1) -> Pairs:
    """Return the pairs of rewards, right and wrong in one form, with their row: where right got more, and where less.

    With a `sign` of -1 less is more.
    """
    more: list[Pair] = []
    less: list[Pair] = []
    if len(rewards) != len(completions):
        return more, less
    by_form = {(each.row, each.form, each.worth): reward for each, reward in zip(completions, rewards)}
    for (row, form, worth), right in by_form.items():
        wrong = by_form.get((row, form, "wrong"))
        if worth == "right" and right is not None and wrong is not None and abs(right - wrong) > SAME:
            (more if sign * (right - wrong) > 0 else less).append((right, wrong, row))
    return more, less


def largest(completions: Sequence[Completion], rewards: Rewards, **wanted: object) -> dict[int, float]:
    """Return the largest reward of each row's completions with these attributes, those with a wrong answer left out."""
    best: dict[int, float] = {}
    for each, value in zip(completions, rewards):
        if each.worth != "wrong" and all(getattr(each, name) == its for name, its in wanted.items()):
            best[each.row] = max(value or 0.0, best.get(each.row, float("-inf")))
    return best


def lead(completions: Sequence[Completion], rewards: Rewards) -> list[float]:
    """Return of each row with a right answer by how much the best form of it is above a text that answers nothing."""
    nothing = [largest(completions, rewards, text=text) for text in ("", NO_ANSWER)]
    right = largest(completions, rewards, worth="right")
    return [reward - max(each.get(row, float("-inf")) for each in nothing) for row, reward in right.items()]


def value(rewards: Rewards) -> str:
    """Return what all completions of a prompt got."""
    values = sorted({reward for reward in rewards if reward is not None})
    if not values:
        return "None"
    return f"{values[0]:g}" if len(values) == 1 else f"one number for each prompt ({span(values)})"


def width(rewards: Rewards) -> float:
    """Return the most less the least."""
    numbers = [reward for reward in rewards if reward is not None]
    return max(numbers, default=0.0) - min(numbers, default=0.0)


def span(rewards: Rewards) -> str:
    """Return the least and the most: `0 to 1`."""
    numbers = [reward for reward in rewards if reward is not None]
    if not numbers:
        return "None"
    return f"{min(numbers):g} to {max(numbers):g}" if min(numbers) < max(numbers) else f"{numbers[0]:g}"
