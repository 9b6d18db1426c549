"""A dozen figures of a run's curves, each against the run's own noise.

A reward curve is noise first of all. Its noise is measured by the differences of neighbours, so that a trend does not
count as noise. "It rises" means: by more than three times what the noise alone would give.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from failurelab.failures.predicates import Value
from failurelab_preflight.diagnose.history import History

TIMES = 3  # noise by which a difference must be larger


def _begin(values: Sequence[float]) -> float:
    """Return the mean of the first quarter."""
    return statistics.fmean(values[: max(1, len(values) // 4)])


def _end(values: Sequence[float]) -> float:
    """Return the mean of the last quarter."""
    return _begin(values[::-1])


def _zeros(values: Sequence[float]) -> float:
    """Return the share that is 0."""
    return statistics.fmean(value == 0 for value in values)


_SUMMARIES: dict[str, tuple[str, Callable[[list[float]], float]]] = {  # what is said of one logged figure
    "grad_zero": ("grad_norm", _zeros),
    "clipped": ("clipped", statistics.fmean),
    "clipped_start": ("clipped", _begin),
    "length_mean": ("length", statistics.fmean),
    "policy_gap_first": ("engine_gap", _begin),
    "policy_gap": ("engine_gap", _end),
    "weight_mean": ("weight_mean", statistics.median),
    "weight_max": ("weight_max", statistics.median),
    "rate_zero": ("learning_rate", _zeros),
}


def measure(history: History) -> dict[str, Value]:
    """Return the figures of a run's curves; what was not logged is absent."""
    if not history.entries:
        return {"entries": 0}
    first, last = history.entries[0]["step"], history.entries[-1]["step"]
    result: dict[str, Value] = {"entries": len(history.entries), "first_step": first, "steps_seen": last}
    result |= _trend(*history.pairs("reward"))
    result |= {f"{figure}_invalid": history.share_invalid(figure) for figure in ("reward", "grad_norm", "loss")}
    for name, (figure, of) in _SUMMARIES.items():
        if values := history.pairs(figure)[1]:
            result[name] = of(values)
    above, below = result.get("policy_gap"), result.get("policy_gap_first")
    if isinstance(above, float) and isinstance(below, float) and below:
        result["gap_grows"] = above / below
    result["clipped_or_unknown"] = result.get("clipped_start", 0.0)
    return result | _spread(history) | _reference(history)


def _trend(steps: Sequence[float], values: Sequence[float]) -> dict[str, Value]:
    """Of the reward: whether it rises, falls or is flat, by its first and last quarter and by its slope."""
    count = len(values)
    if not count:
        return {}
    mean = statistics.fmean(values)
    if count < 4:
        return {"reward_mean": mean, "reward_course": "short"}
    block = count // 4
    begin, end = _begin(values), _end(values)
    noise = math.sqrt(statistics.fmean((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2)
    middle = statistics.fmean(steps)
    spread = math.fsum((step - middle) ** 2 for step in steps)
    slope = math.fsum((s - middle) * (v - mean) for s, v in zip(steps, values)) / spread if spread else 0.0
    error = noise * math.sqrt(2 / block)
    gain, rise = _ratio(end - begin, error), _ratio(slope, noise / math.sqrt(spread) if spread else 0.0)
    best = [statistics.fmean(values[at : at + block]) for at in range(0, count - block + 1, max(1, block // 2))]
    down, up = min(gain, rise), max(gain, rise)
    course = "flat"
    if up > TIMES and up > -down:
        course = "rises"
    elif down < -TIMES:
        course = "falls"
    elif _ratio(max(best) - begin, error) > TIMES + 1:
        course = "rises"  # it had learned, whatever came then
    return {
        "reward_mean": mean,
        "reward_begin": begin,
        "reward_end": end,
        "reward_course": course,
        "reward_fall": -max(gain, rise),  # times its noise, by both measures
        "reward_unseen": TIMES * error,  # a gain below this would not be seen
    }


def _ratio(difference: float, error: float) -> float:
    if abs(difference) < 1e-12:
        return 0.0
    return difference / error if error > 0 else math.copysign(1e6, difference)


def _spread(history: History) -> dict[str, Value]:
    """Of the rewards within a group: how often all are equal, at first, at the start and in all."""
    share = history.pairs("zero_spread")[1] or [float(value < 1e-6) for value in history.pairs("reward_std")[1]]
    if not share:
        return {}
    return {
        "groups_equal": statistics.fmean(share),
        "groups_equal_at_first": share[0],
        "groups_equal_at_start": _begin(share),
    }


def _reference(history: History) -> dict[str, Value]:
    """Of the KL: its first value."""
    steps, kl = history.pairs("kl")
    if not kl:
        return {}
    highest = max(kl)
    return {
        "kl_at_first_step": kl[0],
        "kl_first_step": steps[0],
        "kl_begins_high": kl[0] / highest if highest > 0 else 0.0,
    }
