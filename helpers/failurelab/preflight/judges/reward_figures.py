"""What rewards of made-up completions say: equal or not, right above wrong or not, and short texts for an answer."""

from collections.abc import Sequence

from failurelab.reward_functions.completions import OTHERS, Probe

SAME = 1e-9
Rewards = Sequence[float | None]
Pairs = tuple[list[tuple[float, float]], list[tuple[float, float]], set[int]]


def is_flat(probes: Sequence[Probe], rewards: Rewards) -> bool:
    """Return whether all completions of each prompt got the same."""
    groups: dict[int, set[float | None]] = {}
    for probe, reward in zip(probes, rewards):
        groups.setdefault(probe.row, set()).add(reward)
    return all(len(group) == 1 for group in groups.values())


def compare_pairs(probes: Sequence[Probe], rewards: Rewards, sign: int = 1) -> Pairs:
    """Return the pairs of rewards, right and wrong in one form, where right got more; where less; and rows of those.

    With a `sign` of -1 less is more.
    """
    if len(rewards) != len(probes):
        return [], [], set()
    given = {(probe.row, probe.form, probe.kind): reward for probe, reward in zip(probes, rewards)}
    more, less, rows = [], [], set()
    for (row, form, kind), right in given.items():
        wrong = given.get((row, form, "wrong"))
        if kind != "right" or right is None or wrong is None:
            continue
        if sign * (right - wrong) > SAME:
            more.append((right, wrong))
        elif sign * (wrong - right) > SAME:
            less.append((right, wrong))
            rows.add(row)
    return more, less, rows


def largest(probes: Sequence[Probe], rewards: Rewards, **wanted: object) -> dict[int, float]:
    """Return the largest reward of each row's probes with these attributes; those with a wrong answer do not count."""
    best: dict[int, float] = {}
    for probe, value in zip(probes, rewards):
        if probe.kind != "wrong" and all(getattr(probe, name) == each for name, each in wanted.items()):
            best[probe.row] = max(value or 0.0, best.get(probe.row, float("-inf")))
    return best


def lead(probes: Sequence[Probe], rewards: Rewards) -> list[float]:
    """Return of each row with a right answer by how much the best form of it is above a text that answers nothing."""
    nothing = [largest(probes, rewards, text=text) for text in OTHERS[:2]]
    right = largest(probes, rewards, kind="right")
    return [reward - max(each[row] for each in nothing) for row, reward in right.items()]


def value(rewards: Rewards) -> str:
    """Return what all completions of a prompt got."""
    values = sorted({reward for reward in rewards if reward is not None})
    if not values:
        return "None"
    return f"{values[0]:g}" if len(values) == 1 else f"one number for each prompt ({span(values)})"


def span(rewards: Rewards) -> str:
    """Return the least and the most: `0 to 1`."""
    numbers = [reward for reward in rewards if reward is not None]
    if not numbers:
        return "None"
    return f"{min(numbers):g} to {max(numbers):g}" if min(numbers) < max(numbers) else f"{numbers[0]:g}"


def quote(text: str, width: int = 60) -> str:
    """Return a text in quotes, without its middle where it is long."""
    return repr(text if len(text) <= width else f"{text[: width - 20]} ... {text[-14:]}")
