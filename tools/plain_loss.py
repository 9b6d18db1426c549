"""The loss again, from the formulas, in plain Python and one token at a time: what the cases are checked by.

It shares no line with `definition`, and knows no automatic differentiation: gradients are finite differences. What a
formula holds fixed (a bounded ratio, the probability of a token that was drawn) is computed from `fixed`, which stays
where it is while `live` moves.
"""

import math
from typing import Any

from failurelab.known_gradients.definition import Batch, LossOptions

Rows = list[list[float]]


def clip(value: float, low: float, high: float) -> float:
    """Bound a number."""
    return min(max(value, low), high)


def gain_of(ratio: float, fixed_ratio: float, logp: float, worth: float, options: LossOptions) -> float:
    """Return the objective of one token, which is to rise."""
    if options.objective == "cispo":
        low = 1 - options.epsilon_low if options.cispo_low else -math.inf
        high = options.epsilon_high + 1 if options.cispo_bound == "margin" else options.epsilon_high
        return clip(fixed_ratio, low, high) * worth * logp
    if options.objective == "sapo":
        gate = options.sapo_pos if worth > 0 else options.sapo_neg
        return 4 / gate / (1 + math.exp(-gate * (ratio - 1))) * worth
    if options.objective == "dppo":
        moved = math.exp(logp) - math.exp(logp) / ratio
        return 0.0 if (moved > options.epsilon_high if worth > 0 else moved < -options.epsilon_low) else ratio * worth
    gain = min(ratio * worth, clip(ratio, 1 - options.epsilon_low, 1 + options.epsilon_high) * worth)
    if options.dual_clip and worth < 0:
        return max(gain, options.dual_clip * worth)
    return gain


def kl_of(logp: float, fixed: float, reference: float, ratio: float, options: LossOptions) -> float:
    """Return the KL term of one token."""
    far = reference - logp
    kl = {"k1": -far, "k2": far**2 / 2, "k3": math.exp(far) - far - 1}[options.kl]
    if options.kl_times_ratio:
        kl *= ratio
    return kl * math.exp(logp - fixed) if options.kl_gradient == "total" else kl


def engine_weights(old: list[float], engine: list[float], mask: list[float], options: LossOptions) -> list[float]:
    """Return the weight of each token of a row."""
    logs = [(a - b) * m for a, b, m in zip(old, engine, mask)]
    total, length = sum(logs), max(sum(mask), 1)
    low, high = options.engine_low, options.engine_high
    kind = options.engine
    if kind == "geometric_mask":
        kept = low <= math.exp(total / length) <= high
        return [math.exp(log) * kept for log in logs]
    values = {"token": logs, "sequence": [total] * len(logs), "geometric": [total / length] * len(logs)}
    weights = [math.exp(log) for log in values[str(kind).split("_")[0]]]
    if str(kind).endswith("truncate"):
        return [clip(weight, low, high) for weight in weights]
    return [weight if low <= weight <= high else 0.0 for weight in weights]


def divisor_of(row: int, mask: Rows, batch: Batch, options: LossOptions, how: str) -> float:
    """Return what the tokens of a row are divided by, where they become one number in this way."""
    lengths = [sum(each) for each in mask]
    rows = len(mask) if options.empty_rows else sum(length > 0 for length in lengths)
    micro = next(micro for rank in batch.cut for micro in rank if row in micro)
    groups = batch.group.tolist()
    same = sum(length for length, group in zip(lengths, groups) if group == groups[row])
    return {
        "token_mean": sum(lengths),
        "sequence_mean": rows * max(lengths[row], 1),
        "constant": rows * options.max_length,
        "micro_token_mean": sum(map(len, batch.cut)) * max(sum(lengths[each] for each in micro), 1),
        "sequence_sum": rows,
        "prompt_mean": len(set(groups)) * same,
        "token_sum": 1,
    }[how]


def loss_of(live: Rows, fixed: Rows, entropies: Rows | None, batch: Batch, options: LossOptions) -> float:
    """Return the loss of a step."""
    given = ("old", "reference", "engine", "mask")
    old, reference, engine, mask = (getattr(batch, name).tolist() for name in given)
    total, likelihood, right = 0.0, 0.0, 0.0
    for row, worth in enumerate(batch.advantages.tolist()):
        length = max(sum(mask[row]), 1)
        means = [sum((a - b) * m for a, b, m in zip(x, old[row], mask[row])) / length for x in (live[row], fixed[row])]
        weights = engine_weights(old[row], engine[row], mask[row], options) if options.engine else None
        for place, logp in enumerate(live[row]):
            if not mask[row][place]:
                continue
            ratio, fixed_ratio = (math.exp(x[row][place] - old[row][place]) for x in (live, fixed))
            if options.ratio == "sequence":
                ratio, fixed_ratio = map(math.exp, means)
            gain = gain_of(ratio, fixed_ratio, logp, worth, options) * (weights[place] if weights else 1.0)
            kl = kl_of(logp, fixed[row][place], reference[row][place], ratio, options)
            term = -gain - (options.entropy_coef * entropies[row][place] if entropies else 0.0)
            how = options.reduce if options.kl_reduce == "same" else options.kl_reduce
            total += term / divisor_of(row, mask, batch, options, options.reduce)
            total += options.beta * kl / divisor_of(row, mask, batch, options, how)
            if batch.rewards[row] > 0:
                likelihood, right = likelihood + logp, right + 1
    return total - (options.nll_weight * likelihood / right if options.nll_weight else 0.0)


def read_logits(logits: list[Rows], ids: list[list[int]], options: LossOptions) -> tuple[Rows, Rows]:
    """Return log-probabilities of the words that were drawn, and the entropies."""
    logps: Rows = []
    entropies: Rows = []
    for words, drawn in zip(logits, ids):
        scaled = [[value / options.temperature for value in place] for place in words]
        logs = [[value - math.log(sum(map(math.exp, place))) for value in place] for place in scaled]
        logps.append([place[word] for place, word in zip(logs, drawn)])
        entropies.append([-sum(math.exp(log) * log for log in place) for place in logs])
    return logps, entropies


def difference_quotients(batch: Batch, options: LossOptions, step: float = 1e-5) -> tuple[float, list[Any]]:
    """Return the loss, and its gradient by central differences: by log-probabilities, or by logits where given."""
    by_logits = batch.logits is not None and batch.ids is not None
    inputs = (batch.logits if batch.logits is not None else batch.logps).tolist()

    def score() -> tuple[Rows, Rows | None]:
        return read_logits(inputs, batch.ids.tolist(), options) if by_logits else (inputs, None)  # type: ignore[union-attr]

    fixed = [list(row) for row in score()[0]]

    def value() -> float:
        live, entropies = score()
        return loss_of(live, fixed, entropies, batch, options)

    def differentiate(part: list[Any]) -> list[Any]:
        if isinstance(part[0], list):
            return [differentiate(each) for each in part]
        result = []
        for place, here in enumerate(part):
            sides = []
            for side in (step, -step):
                part[place] = here + side
                sides.append(value())
            part[place] = here
            result.append((sides[0] - sides[1]) / (2 * step))
        return result

    return value(), differentiate(inputs)


def advantages_of(batch: Batch, options: LossOptions) -> list[float]:
    """Return the advantages that the rewards give."""
    rewards, groups = batch.rewards.tolist(), batch.group.tolist()
    result = []
    for reward, group in zip(rewards, groups):
        known = [other for other, its in zip(rewards, groups) if its == group and not math.isnan(other)]
        spread = [other for other in rewards if not math.isnan(other)] if options.scale == "batch" else known
        middle = sum(spread) / len(spread)
        deviation = math.sqrt(sum((other - middle) ** 2 for other in spread) / max(len(spread) - 1, 1))
        away = reward - sum(known) / len(known)
        result.append(0.0 if math.isnan(reward) else away / (1.0 if options.scale == "none" else deviation + 1e-4))
    return result
