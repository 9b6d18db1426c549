"""RLOO's loss, from the rewards to one number: what of GRPO's definition is another equation, and nothing else.

Ahmadian et al. (arXiv 2402.14740): REINFORCE of whole completions (equation 4), whose reward holds the penalty for
going away from the reference (equation 2), with the mean of the other completions as baseline (section 2.3). With
r(y) the sum of the reward functions, and k completions of a prompt,

    R_i = r(y_i) - beta * log(policy(y_i) / reference(y_i)),   A_i = R_i - mean of the k - 1 other R_j,
    loss = - mean over completions of min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A),

and ratio = policy(y) / policy that drew y, of the whole completion: trl clips it as PPO (arXiv 1707.06347) does. A_i
has no gradient. R is the number of rows (completions), T of tokens, F of reward functions.
"""

import math

import torch
from torch import Tensor

from failurelab.textbook.definition import DIVISORS, SMALL, Definition, clipped, deviation, left_out, mean, weighted_sum
from failurelab.textbook.fields import Options
from failurelab.textbook.rows import Row


def divergence(row: Row, options: Options) -> float:
    """Return log(policy / reference) of a completion, of the policy that drew it; 0 of one that is left out."""
    return 0.0 if left_out(row, options) and not options.truncated_kl else row.kl


def penalized(rewards: Tensor, kl: Tensor, options: Options) -> Tensor:
    """Return the reward of each completion, NaN where no function gave one: (R, F), (R,) -> (R,)."""
    low, high = options.reward_clip_range or (-math.inf, math.inf)
    total = weighted_sum(rewards, rewards.isnan().all(1), options)  # (R,)
    return total.clamp(low, high) - options.kl_in_reward * kl


def normalized(worth: Tensor, batch: Tensor, options: Options) -> Tensor:
    """Return advantages of mean 0 and deviation 1 over the generation, where asked for: (R,), (R, R) -> (R,)."""
    if options.normalize_advantages:
        worth = (worth - mean(worth, batch)) / (deviation(worth, batch) + SMALL)
    return worth.nan_to_num(nan=0.0)


def leave_one_out(rewards: Tensor, group: Tensor, batch: Tensor, kl: Tensor, options: Options) -> Tensor:
    """Take the mean of the others of the group off: (R, F), (R, R), (R, R), (R,) -> (R,)."""
    total = penalized(rewards, kl, options)  # (R,)
    others = group & ~torch.eye(len(total), dtype=torch.bool)  # (R, R)
    return normalized(total - mean(total, others), batch, options)


def of_completion(difference: Tensor, mask: Tensor, options: Options) -> Tensor:
    """Return the log-ratio of the whole completion, the sum of its tokens': (R, T), (R, T) -> (R, 1)."""
    return (difference * mask).sum(1, keepdim=True)


# The objective (R, 1) is a completion's; each of its T tokens has a T-th of it, which is what GRPO's divisor does.
RLOO = Definition(
    name="RLOO",
    taken=divergence,
    advantages=leave_one_out,
    log_ratio=of_completion,
    objective=clipped,
    divisor=DIVISORS["grpo"],
)
