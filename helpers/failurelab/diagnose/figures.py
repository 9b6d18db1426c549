"""Figures of a run's curves, each against the run's own noise.

A reward curve is noise first of all. Its noise is measured by the differences of neighbours, so that a trend does not
count as noise. "It rises" means: by more than three times what the noise alone would give.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from failurelab.diagnose.history import History
from failurelab.failures.predicates import Value

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
    "grad_median": ("grad_norm", statistics.median),
    "clipped_mean": ("clipped", statistics.fmean),
    "clipped_start": ("clipped", _begin),
    "length_mean": ("length", statistics.fmean),
    "gap_start": ("engine_gap", _begin),
    "gap_end": ("engine_gap", _end),
    "gap_max": ("engine_gap_max", statistics.median),
    "weight_mean": ("weight_mean", statistics.median),
    "weight_min": ("weight_min", statistics.median),
    "rate_max": ("learning_rate", max),
    "rate_zero": ("learning_rate", _zeros),
}


def measure(history: History) -> dict[str, Value]:
    """Return the figures of a run's curves; what was not logged is absent."""
    result: dict[str, Value] = {"entries": history.entries}
    if not history.entries:
        return result
    steps = list(history.steps)
    result["first_step"] = steps[0]
    result["steps_seen"] = steps[-1] if history.numbered else len(steps)
    for figure in ("reward", "entropy"):
        result |= {f"{figure}_{name}": value for name, value in _trend(*history.pairs(figure)).items()}
    for figure in ("reward", "grad_norm", "loss"):
        if figure in history.invalid:
            result[f"{figure}_invalid"] = history.invalid[figure] / history.entries
    for name, (figure, of) in _SUMMARIES.items():
        if values := history.pairs(figure)[1]:
            result[name] = of(values)
    _spread(history, result)
    _reference(history, result)
    _beta(history, result)
    result["log_of_old_trl"] = history.old_names
    if dead := _dead_functions(history):
        result["dead_functions"] = dead
    return result


def _dead_functions(history: History) -> str:
    """Name the reward functions that give one number, 0 or less, in each entry, if others do not."""
    constant = {}
    for name, column in history.rewards.items():
        values = [value for value in column if not math.isnan(value)]
        constant[name] = len(values) >= 6 and max(values) == min(values) and values[0]
    if all(value is not False for value in constant.values()):
        return ""
    return ", ".join(f"{name} gives {value:g}" for name, value in constant.items() if value is not False and value <= 0)


def _trend(steps: Sequence[float], values: Sequence[float]) -> dict[str, Value]:
    count = len(values)
    if not count:
        return {}
    result: dict[str, Value] = {"low": min(values), "high": max(values), "mean": statistics.fmean(values)}
    result["constant"] = count > 1 and max(values) - min(values) <= 1e-9 * max(1.0, abs(values[0]))
    if count < 4:
        return result | {"course": "short"}
    block = count // 4
    begin, end = _begin(values), _end(values)
    noise = math.sqrt(statistics.fmean((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2)
    middle, mean = statistics.fmean(steps), statistics.fmean(values)
    spread = math.fsum((step - middle) ** 2 for step in steps)
    slope = math.fsum((s - middle) * (v - mean) for s, v in zip(steps, values)) / spread if spread else 0.0
    error = noise * math.sqrt(2 / block)
    slope_error = noise / math.sqrt(spread) if spread else 0.0
    gain, rise = _ratio(end - begin, error), _ratio(slope, slope_error)
    result |= {
        "begin": begin,
        "end": end,
        "gain_in_noise": gain,
        "slope_in_noise": rise,
        "unseen": TIMES * error,  # a gain below this would not be seen
    }
    best = [statistics.fmean(values[at : at + block]) for at in range(0, count - block + 1, max(1, block // 2))]
    down, up = min(gain, rise), max(gain, rise)
    course = "flat"
    if up > TIMES and up > -down:
        course = "rises"
    elif down < -TIMES:
        course = "falls"
    elif _ratio(max(best) - begin, error) > TIMES + 1:
        course = "rises"  # it had learned, whatever came then
    return result | {"course": course, "moves": max(up, -down) > TIMES}


def _ratio(difference: float, error: float) -> float:
    if abs(difference) < 1e-12:
        return 0.0
    return difference / error if error > 0 else math.copysign(1e6, difference)


def _spread(history: History, result: dict[str, Value]) -> None:
    """Of the rewards within a group: how often all are equal, at the start, at the end and in all."""
    steps, values = history.pairs("zero_spread")
    if values:
        none, share = [value >= 0.999 for value in values], values
    else:
        steps, values = history.pairs("reward_std")
        if not values:
            return
        none = [value < 1e-6 for value in values]
        share = [float(each) for each in none]
    result["groups_equal"], result["groups_equal_at_first"] = statistics.fmean(share), share[0]
    result["groups_equal_at_start"], result["groups_equal_at_end"] = _begin(share), _end(share)
    if none[-1]:  # from which step on, to the end
        result["equal_from"] = steps[len(none) - len(list(itertools.takewhile(bool, reversed(none))))]


def _reference(history: History, result: dict[str, Value]) -> None:
    steps, kl = history.pairs("kl")
    if not kl:
        return
    result["kl_first"], result["kl_first_step"], result["kl_max"] = kl[0], steps[0], max(kl)
    result["kl_begins_high"] = kl[0] / max(kl) if max(kl) > 0 else 0.0


def _beta(history: History, result: dict[str, Value]) -> None:
    """Of a run that uses every batch once, loss / kl is beta: the advantages' mean is 0."""
    losses, kls = history.figures.get("loss", ()), history.figures.get("kl", ())
    ratios = sorted(loss / kl for loss, kl in zip(losses, kls) if kl > 1e-3 and math.isfinite(loss / kl))
    if len(ratios) >= 4:
        result["implied_beta"] = statistics.median(ratios)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        result["implied_beta_spread"] = high / low if low > 0 else 1e6
