"""GRPO's loss, from the rewards to one number, as its papers define it: to be read from top to bottom.

R is the number of rows (completions), T of tokens, F of reward functions, V of words. An option is looked up in a table
of functions. A mistake is `dataclasses.replace(GRPO, kl=...)`: the definition with one function replaced.

DeepSeekMath (arXiv 2402.03300), equations 3, 4, 8; `dapo` 2503.14476, `dr_grpo` 2503.20783, `cispo` 2506.13585, `sapo`
2511.20347, `luspo` 2602.05261, ratio of a sequence 2507.18071, two-sided clipping 2505.07291, high entropy 2506.01939,
unbiased KL and off-policy masks 2512.02556, scaling by the `batch` 2508.08221, `normalize_then_sum` 2601.05242, `vespo`
2602.10693; the weights of tokens that an engine drew, and their bounds: fengyao.notion.site/off-policy-rl.

LUSPO's paper has one ratio for a completion. At the level of tokens, trl's default, each token has its own ratio and
its own bounds, and a completion's term is the plain sum over its tokens.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from failurelab.textbook.fields import Options
from failurelab.textbook.rows import Row, Scoring

SMALL = 1e-4  # added to a standard deviation, so that equal rewards do not divide by zero


# 1. Advantages: how much better a completion is than the others of its group. NaN is a reward that was not given.
def mean(values: Tensor, same: Tensor) -> Tensor:
    """Return for each row the mean over the rows that are the same as it: (R,), (R, R) -> (R,)."""
    known = same & ~values.isnan()  # (R, R)
    return torch.where(known, values, 0.0).sum(1) / known.sum(1)


def deviation(values: Tensor, same: Tensor) -> Tensor:
    """Return the unbiased standard deviation over these rows; 0 of a single one: (R,), (R, R) -> (R,)."""
    known = same & ~values.isnan()  # (R, R)
    away = torch.where(known, values - mean(values, same)[:, None], 0.0)  # (R, R)
    return (away.square().sum(1) / (known.sum(1) - 1).clamp(min=1)).sqrt()


def weighted_sum(rewards: Tensor, unscored: Tensor, options: Options) -> Tensor:
    """Add the functions up; NaN where none gave a reward: (R, F), (R,) -> (R,)."""
    weights = torch.tensor(options.reward_weights or (1.0,) * rewards.shape[1], dtype=rewards.dtype)  # (F,)
    return (rewards * weights).nansum(1).masked_fill(unscored, math.nan)


SCALES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "group": lambda total, group, batch: deviation(total, group) + SMALL,  # (R,), (R, R), (R, R) -> (R,)
    "batch": lambda total, group, batch: deviation(total, batch) + SMALL,
    "none": lambda total, group, batch: torch.ones_like(total),
}


def sum_then_normalize(rewards: Tensor, group: Tensor, batch: Tensor, options: Options) -> Tensor:
    """Take the group's mean off the sum, and divide; 0 without rewards: (R, F), (R, R), (R, R) -> (R,)."""
    total = weighted_sum(rewards, rewards.isnan().all(1), options)  # (R,)
    return ((total - mean(total, group)) / SCALES[options.scale_rewards](total, group, batch)).nan_to_num(nan=0.0)


def normalize_then_sum(rewards: Tensor, group: Tensor, batch: Tensor, options: Options) -> Tensor:
    """Normalize each function by itself, then the sum over the batch: (R, F), (R, R), (R, R) -> (R,)."""
    columns = [(column - mean(column, group)) / (deviation(column, group) + SMALL) for column in rewards.T]
    total = weighted_sum(torch.stack(columns, 1), rewards.isnan().all(1), options)  # (R,)
    return ((total - mean(total, batch)) / (deviation(total, batch) + SMALL)).nan_to_num(nan=0.0)


ADVANTAGES = {"sum_then_normalize": sum_then_normalize, "normalize_then_sum": normalize_then_sum}


# 2. Scores: log-probabilities of the policy at the temperature of the sampling, from the row of logits before a token.
def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-probability of every word: (T, V) -> (T, V)."""
    return (logits.float() / temperature).log_softmax(-1)


# 3. Ratio of the policy's probability to that of the policy that drew; and an estimate of KL(policy || reference).
LOG_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda difference, mask: difference,  # (R, T), (R, T) -> (R, T)
    "sequence": lambda difference, mask: ((difference * mask).sum(1) / mask.sum(1).clamp(min=1))[:, None],  # (R, 1)
}
KL_FACTORS: dict[bool, Callable[[Tensor], Tensor]] = {False: torch.ones_like, True: lambda ratio: ratio}


def engine_weight(difference: Tensor, mask: Tensor, options: Options) -> Tensor:
    """Weigh tokens or rows by policy / engine, within bounds; NaN is unknown: (R, T), (R, T) -> (R, T) or (R, 1)."""
    level, _, within = (options.engine_weight or "token_truncate").partition("_")
    logs = difference.nan_to_num(0.0) * mask * (options.engine_weight is not None)  # (R, T)
    weight = {"token": logs, "sequence": logs.sum(1, keepdim=True)}[level].exp()
    held = weight.clamp(*options.engine_bounds)
    return {"truncate": held, "mask": torch.where(held == weight, weight, 0.0)}[within]


def k3(difference: Tensor) -> Tensor:
    """Estimate the divergence from log(reference / policy) of each token, (R, T) (Schulman 2020)."""
    return difference.exp() - difference - 1


# 4. Objective, which is to rise: of ratios (R, T) or (R, 1), advantages (R, 1) and log-probabilities (R, T).
def clipped(ratio: Tensor, worth: Tensor, logps: Tensor, options: Options) -> Tensor:
    """Take the smaller of both products, so that no step is paid for going further."""
    return torch.minimum(ratio.clamp(max=options.most_ratio) * worth, ratio.clamp(*options.bounds) * worth)


def cispo(ratio: Tensor, worth: Tensor, logps: Tensor, options: Options) -> Tensor:
    """Weigh with a bounded ratio that has no gradient of its own."""
    return ratio.clamp(*options.bounds).detach() * worth * logps


def sapo(ratio: Tensor, worth: Tensor, logps: Tensor, options: Options) -> Tensor:
    """Let a soft gate close around a ratio of 1."""
    gate = torch.where(worth > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)  # (R, 1)
    return torch.sigmoid(gate * (ratio - 1)) * 4 / gate * worth


def vespo(ratio: Tensor, worth: Tensor, logps: Tensor, options: Options) -> Tensor:
    """Weigh a whole row by w^k exp(l (1 - w)), which has no gradient of its own; k and l go by the advantage's sign."""
    power = torch.where(worth >= 0, options.vespo_k_pos, options.vespo_k_neg)  # (R, 1)
    decay = torch.where(worth >= 0, options.vespo_lambda_pos, options.vespo_lambda_neg)  # (R, 1)
    return (ratio**power * (decay * (1 - ratio)).exp()).detach() * worth * logps


def vespo_ratio(difference: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """Return the ratio of a whole row to what drew it, engine included: (R, T), (R, T), (R, T) -> (R, 1)."""
    return (difference * mask + weight.clamp(min=1e-8).log()).sum(1, keepdim=True).clamp(math.log(1e-8), 20).exp()


OBJECTIVES = dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), clipped)
OBJECTIVES |= {"cispo": cispo, "sapo": sapo, "vespo": vespo}


def is_fresh(difference: Tensor, worth: Tensor, mask: Tensor, options: Options) -> Tensor:
    """Say which rows with a negative advantage are not too far from what drew them, an engine or a policy, (R, 1)."""
    away = difference.detach().nan_to_num(0.0) * mask  # (R, T)
    drift = -away.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # (R, 1)
    return (worth >= 0) | (drift <= options.most_drift)


# 5. What a row's tokens are divided by, (R,). `sizes` has, (R,): tokens, and its micro-batch's completions and tokens;
# and of all: the number of micro-batches, the step's tokens, and its share of the tokens of the generation.
DIVISORS: dict[str, Callable[[Any, Options], Tensor]] = {
    "grpo": lambda sizes, options: sizes.micros * sizes.completions * sizes.tokens,
    "bnpo": lambda sizes, options: sizes.micros * sizes.micro_tokens,
    "dr_grpo": lambda sizes, options: sizes.micros * sizes.completions * (options.max_completion_length or 1),
    "luspo": lambda sizes, options: sizes.micros * sizes.completions,
    "dapo": lambda sizes, options: {False: sizes.step_tokens, True: sizes.share}[options.generation_tokens],
}
DIVISORS |= {"sapo": DIVISORS["grpo"], "cispo": DIVISORS["dapo"], "vespo": DIVISORS["dapo"]}


def left_out(row: Row, options: Options) -> bool:
    """Whether a completion is left out because it was cut."""
    ended = row.ended or (options.padding_ends and row.ends_in_padding)
    return options.mask_truncated_completions and not ended


@dataclasses.dataclass(frozen=True)
class Definition:
    """The functions that the loss is made of; a suspect replaces one of them.

    `together` rows, which stand side by side, make one term of the loss. `taken` is what a row's reward loses something
    for: advantages are given it for all rows, (R,), behind the matrices. `read` is a row as the model reads it.
    """

    name: str = "GRPO"
    together: int = 1
    taken: Callable[[Row, Options], float] | None = None
    read: Callable[[Row, Options], Row] = lambda row, options: row
    advantages: Callable[..., Tensor] = lambda *given: ADVANTAGES[given[-1].multi_objective_aggregation](*given)
    scoring: Callable[[Options, int], Scoring] = lambda options, pad: Scoring(options.temperature, pad=pad)
    quantile: Callable[[Options], float] = lambda options: options.top_entropy_quantile
    log_ratio: Callable[..., Tensor] = lambda *given: LOG_RATIOS[given[-1].importance_sampling_level](*given[:-1])
    objective: Callable[..., Tensor] = lambda *given: OBJECTIVES[given[-1].loss_type](*given)
    engine_weight: Callable[[Tensor, Tensor, Options], Tensor] = engine_weight
    kl: Callable[[Tensor], Tensor] = k3
    divisor: Callable[[Any, Options], Tensor] = lambda sizes, options: DIVISORS[options.loss_type](sizes, options)
    entropy: Callable[[Tensor, Tensor], Tensor] = lambda entropies, counts: (entropies / counts).sum()

    def loss(self, part: Any, options: Options) -> Any:
        """Return the loss of some rows, of which `part` has tensors; those of all rows add up to the step's."""
        difference = part.logps - part.old_logps  # (R, T)
        ratio = self.log_ratio(difference, part.mask, options).exp()  # (R, T) or (R, 1)
        weight = self.engine_weight(part.old_logps - part.engine_logps, part.mask, options)  # (R, T) or (R, 1)
        kl = self.kl(part.reference_logps - part.logps) * KL_FACTORS[options.use_bias_correction_kl](ratio)  # (R, T)
        if options.loss_type == "vespo":  # which has the engine's weight in its ratio
            ratio, weight = vespo_ratio(difference, weight, part.mask), torch.ones_like(part.mask)  # (R, 1), (R, T)
        gain = self.objective(ratio, part.worth, part.logps, options) * weight  # (R, T) or (R, 1)
        fresh = is_fresh(part.logps - part.engine_logps, part.worth, part.mask, options)  # (R, 1)
        loss = (
            (options.beta * kl - gain * fresh * part.chosen) * part.mask * part.weights
        ).sum()  # weights are 1 / divisor, (R, 1)
        kept = part.entropies * part.mask * part.chosen * (part.weights > 0)  # (R, T)
        return loss - options.entropy_coef * self.entropy(kept, part.counts)  # of its micro-batch, (R, 1)


GRPO = Definition()
