"""Online DPO's loss, from what was preferred to one number: to be read from top to bottom.

Guo et al. (arXiv 2402.04792, algorithm 1): the policy draws two completions of each prompt, a judge or a reward prefers
one, and the policy takes one step of the loss of DPO (Rafailov et al., arXiv 2305.18290, equation 7) or of IPO (Azar et
al., arXiv 2310.12036, equation 17), whose tau is `beta`:

    margin = log(policy(chosen) / reference(chosen)) - log(policy(rejected) / reference(rejected)),
    loss = mean over pairs of - log sigmoid(beta * margin), or of (margin - 1 / (2 beta))^2.

The log-probability of a completion is the sum of its tokens', its end among them, of the policy itself: the temperature
of the sampling has no part in it. Of equally good completions the first is the chosen one, and such a pair has a
gradient as any other. A pair that nothing was said of has none. The tokens of the prompt would cancel in the margin.
R is the number of rows (completions), which stand in pairs, T of tokens, F of reward functions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from failurelab.textbook.definition import Definition, mean, weighted_sum
from failurelab.textbook.fields import Options
from failurelab.textbook.rows import Row


def total_of(rewards: Tensor, cut: Tensor, options: Options) -> Tensor:
    """Return the reward of each completion, less the penalty of one without an end: (R, F), (R,) -> (R,).

    In float32, as trainers compare them: what is equal there is a tie. NaN where no function gave one.
    """
    unscored = rewards.isnan().all(1)  # (R,)
    return weighted_sum(rewards.float(), unscored, options) - (options.missing_eos_penalty or 0.0) * cut.float()


def prefer(rewards: Tensor, group: Tensor, batch: Tensor, cut: Tensor, options: Options) -> Tensor:
    """Return 1 for the chosen one of each pair, -1 for the other, 0 where nothing was said: ... -> (R,)."""
    return compared(total_of(rewards, cut, options), group, torch.greater_equal)


def compared(total: Tensor, group: Tensor, first_is: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the signs of pairs by whether the first is the chosen one: (R,), (R, R) -> (R,)."""
    others = group & ~torch.eye(len(total), dtype=torch.bool)  # (R, R), one other for each
    other, leads = mean(total, others), others.triu().any(1)  # (R,), (R,): whether it is the first of its pair
    chosen = torch.where(leads, first_is(total, other), ~first_is(other, total))  # (R,)
    signs = torch.where(chosen, 1.0, -1.0).masked_fill(total.isnan() | other.isnan(), 0.0)
    return signs.double()


def say_ties(rewards: Tensor, cut: Tensor, options: Options) -> str:
    """Return how many pairs are ties, and how many are without a preference; "" where none is."""
    total = total_of(rewards, cut, options).view(-1, 2)  # (R / 2, 2)
    ties, unsaid = int((total[:, 0] == total[:, 1]).sum()), int(total.isnan().any(1).sum())
    said = [f"{ties} of {len(total)} pairs are ties: the first completion is chosen, and the gradient is as large"]
    return "; ".join(said * bool(ties) + [f"of {unsaid} of {len(total)} pairs nothing was said"] * bool(unsaid))


def shortened(row: Row, options: Options) -> Row:
    """Return the row with as much of its prompt, from its end, as `max_length` leaves room for beside the completion.

    A prompt with images is whole.

    Raises:
        ValueError: no token of the prompt is left, and so nothing that the first token's probability depends on.
    """
    length = row.padded[1] if options.length_padded else len(row.completion)
    over = len(row.prompt) + length - (options.max_length or len(row.prompt) + length)
    if over >= len(row.prompt) and not row.inputs:
        raise ValueError(f"max_length={options.max_length} leaves no token of a prompt beside {length} of a completion")
    return row if over <= 0 or row.inputs else dataclasses.replace(row, prompt=row.prompt[over:])


PREFERENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": lambda margin, beta: -torch.nn.functional.logsigmoid(beta * margin),  # (R / 2,) -> (R / 2,)
    "ipo": lambda margin, beta: (margin - 1 / (2 * beta)).square(),
}


class PairDefinition(Definition):
    """A definition whose loss is one of pairs."""

    def loss(self, part: Any, options: Options) -> Any:
        """Return the loss of some pairs, of which `part` has tensors; those of all pairs add up to the step's."""
        log_ratio = ((part.logps - part.reference_logps) * part.mask).sum(1)  # (R,)
        margin = (part.worth[:, 0] * log_ratio).view(-1, 2).sum(1)  # (R / 2,), chosen less rejected
        loss = PREFERENCES[options.loss_type](margin, options.beta)  # (R / 2,)
        return (loss * part.weights[::2, 0]).sum()  # weights are 1 / divisor, (R, 1)


ONLINE_DPO = PairDefinition(
    name="Online DPO",
    together=2,
    taken=lambda row, options: float(not row.ended),
    read=shortened,
    advantages=prefer,
    divisor=lambda sizes, options: sizes.micros * sizes.completions / 2,  # the pairs of a micro-batch
)
