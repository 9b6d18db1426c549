"""The loss that a case asks for, in float64: a table of functions for each option, to be read from top to bottom.

R is the number of rows (completions), T of places in the longest, V of words. What GRPO's papers define is taken from
`failurelab.textbook.definition`. What only other libraries have stands here: dual clipping (arXiv 1912.09729), k1 and
k2 (Schulman 2020), the gradient of the divergence itself (2506.09477), GSPO by any mean, the likelihood of right
answers (2504.05118), and how a batch is cut into ranks and micro-batches.

A mistake that people make is a definition too, `LossOptions(wrong=...)`: the name of a difference is the name of the
definition that has the same gradient.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from failurelab.textbook import definition as textbook

Cut = list[list[list[int]]]  # of each rank, of each of its micro-batches: rows


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """What is asked for; the defaults are plain GRPO, as a mean over all tokens."""

    objective: str = "clip"  # `clip` (PPO's), `cispo`, `sapo`, or `dppo`, whose bounds are of probabilities
    ratio: str = "token"  # one for each `token`, or for the `sequence` (GSPO)
    epsilon_low: float = 0.2  # the ratio's lower bound is 1 - epsilon_low
    epsilon_high: float = 0.2  # the upper one is 1 + epsilon_high
    cispo_bound: str = "margin"  # CISPO's upper bound is 1 + epsilon_high; `absolute`: it is epsilon_high itself
    cispo_low: bool = True  # whether CISPO has the lower bound
    sapo_pos: float = 1.0  # temperature of SAPO's gate for positive advantages
    sapo_neg: float = 1.05  # the same, for the others
    dual_clip: float | None = None  # the most that a ratio counts with a negative advantage, without gradient beyond
    reduce: str = "token_mean"  # how the tokens become one number: see REDUCES
    max_length: int = 16  # what `constant` divides each row by
    empty_rows: bool = True  # whether rows without a token count where rows are counted
    kl_reduce: str = "same"  # how the KL term becomes one number; `same`: as the policy's does
    beta: float = 0.0  # weight of the KL term
    kl: str = "k3"  # its estimator, `k1`, `k2` or `k3`
    kl_gradient: str = "pathwise"  # of the estimator alone, or `total`: with the score term of the drawn tokens
    kl_times_ratio: bool = False  # whether it is multiplied by the ratio (DeepSeek-V3.2)
    kl_cap: float | None = None  # the most that the KL term of one token counts, without gradient beyond
    engine: str | None = None  # weight by old / engine: `token`, `sequence` or `geometric`, _truncate or _mask
    engine_low: float = -math.inf  # its lower bound
    engine_high: float = math.inf  # its upper bound
    nll_weight: float = 0.0  # weight of the mean negative log-likelihood of the tokens of rows with a positive reward
    temperature: float = 1.0  # that logits are divided by
    entropy_coef: float = 0.0  # weight of the mean entropy
    scale: str = "group"  # advantages are divided by the deviation of the `group` or the `batch`, or by `none`
    wrong: frozenset[str] = frozenset()  # mistakes, for names of differences

    @property
    def bounds(self) -> tuple[float, float]:
        """Of the ratio."""
        if self.objective != "cispo":
            return 1 - self.epsilon_low, 1 + self.epsilon_high
        low = 1 - self.epsilon_low if self.cispo_low else -math.inf
        return low, self.epsilon_high + (self.cispo_bound == "margin")

    # Under the names that the textbook's functions ask for.
    most_ratio = math.inf
    sapo_temperature_pos = property(lambda self: torch.tensor(self.sapo_pos, dtype=torch.float64))
    sapo_temperature_neg = property(lambda self: torch.tensor(self.sapo_neg, dtype=torch.float64))


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Inputs of a case; `logps` is what the gradient is taken by, or, where there are any, `logits`."""

    logps: Tensor  # log-probabilities of the policy, (R, T), as are `old`, `reference` and `engine`
    old: Tensor
    reference: Tensor
    engine: Tensor
    mask: Tensor  # 1 for each token that is trained on, (R, T)
    rewards: Tensor  # (R,)
    group: Tensor  # which rows have one prompt, (R,)
    advantages: Tensor  # (R,)
    cut: Cut  # which rows each micro-batch of each rank has
    logits: Tensor | None = None  # (R, T, V)
    ids: Tensor | None = None  # the words that were drawn, (R, T)


# 1. The term of each token, which is to fall, (R, T) or (R, 1).
def keep_near(ratio: Tensor, worth: Tensor, logps: Tensor, options: LossOptions) -> Tensor:
    """Leave out tokens whose probability has moved too far the way it is pushed (DPPO, arXiv 2602.04879)."""
    moved = logps.exp() - (logps - ratio.log()).exp()  # (R, T): of the policy that drew
    left_out = torch.where(worth > 0, moved > options.epsilon_high, moved < -options.epsilon_low)
    return ratio * worth * ~left_out


OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "clip": textbook.clipped,
    "cispo": textbook.cispo,
    "sapo": textbook.sapo,
    "dppo": keep_near,
}
KLS: dict[str, Callable[[Tensor], Tensor]] = {  # of log(reference / policy)
    "k1": lambda difference: -difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": textbook.k3,
}


def weigh_engine(batch: Batch, options: LossOptions) -> Tensor:
    """Return the weights of tokens or rows by old / engine, within bounds: (R, T) or (R, 1)."""
    level, _, within = str(options.engine).partition("_")
    logs = (batch.old - batch.engine) * batch.mask  # (R, T)
    tokens = batch.mask.sum(1, keepdim=True).clamp(min=1)  # (R, 1)
    weight = {"token": logs, "sequence": logs.sum(1, True), "geometric": logs.sum(1, True) / tokens}[level].exp()
    held = weight.clamp(options.engine_low, options.engine_high)
    if within == "truncate":
        return held
    return torch.where(held == weight, logs.exp() if level == "geometric" else weight, 0.0)  # geometric: the rows alone


def drawn_by_policy(logps: Tensor) -> Tensor:
    """Return ones whose gradient is that of log p: what the choice of the tokens adds."""
    return (logps - logps.detach()).exp()


def estimate_kl(logps: Tensor, ratio: Tensor, batch: Batch, options: LossOptions) -> Tensor:
    """Return the KL term of each token, (R, T)."""
    kl = KLS[options.kl](batch.reference - logps)
    if options.kl_times_ratio:
        kl = kl * ratio
    if options.kl_gradient == "total":
        kl = kl * drawn_by_policy(logps)
    return kl.clamp(-options.kl_cap, options.kl_cap) if options.kl_cap else kl


def token_losses(logps: Tensor, batch: Batch, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return what each token adds of the policy's term and of the KL term, before they are divided: (R, T) each."""
    difference = logps - (logps.detach() if "ratio is 1" in options.wrong else batch.old)
    ratio = textbook.LOG_RATIOS[options.ratio](difference, batch.mask).exp()  # (R, T) or (R, 1)
    worth = batch.advantages[:, None]
    gain = OBJECTIVES[options.objective](ratio, worth, logps, options)
    if options.dual_clip:
        gain = torch.where(worth < 0, torch.maximum(gain, options.dual_clip * worth), gain)
    if options.engine:
        gain = gain * weigh_engine(batch, options)
    kl = estimate_kl(logps, ratio, batch, options) * (-1 if "KL with the wrong sign" in options.wrong else 1)
    return -gain.expand_as(kl), options.beta * kl


def join(parts: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the rows of several micro-batches, or the micro-batches of several ranks."""
    return [each for part in parts for each in part]


# 2. What each token is multiplied by, (R, 1).
def count_sizes(batch: Batch, options: LossOptions) -> Any:
    """Return the counts that tokens are divided by, (R, 1) where they differ by row; a turn is one micro-batch of every
    rank.
    """
    tokens = batch.mask.sum(1, keepdim=True)  # (R, 1)
    parts = {"rank": [join(rank) for rank in batch.cut], "turn": [join(turn) for turn in zip(*batch.cut)]}
    parts |= {
        "micro": join(batch.cut),
        "group": [(batch.group == each).nonzero()[:, 0] for each in batch.group.unique()],
    }
    sizes = {name: torch.ones_like(tokens) for name in parts}
    rows = torch.ones_like(tokens)  # of each row's micro-batch
    for name, together in parts.items():
        for part in together:
            sizes[name][part] = tokens[part].sum().clamp(min=1)
    for micro in join(batch.cut):
        rows[micro] = float(len(micro))
    return SimpleNamespace(
        tokens=tokens.clamp(min=1), all_tokens=tokens.sum(), width=batch.mask.shape[1], micro_rows=rows,
        rows=len(tokens) if options.empty_rows else (tokens > 0).sum(), groups=len(parts["group"]),
        micros=len(parts["micro"]), ranks=len(batch.cut), **{f"{name}_tokens": each for name, each in sizes.items()},
    )  # fmt: skip


REDUCES: dict[str, Callable[[Any, LossOptions], Tensor]] = {
    "token_mean": lambda sizes, options: 1 / sizes.all_tokens,  # of all ranks and micro-batches (DAPO)
    "sequence_mean": lambda sizes, options: 1 / (sizes.rows * sizes.tokens),  # the mean of rows' means (GRPO)
    "constant": lambda sizes, options: 1 / (sizes.rows * options.max_length),  # (Dr. GRPO)
    "micro_token_mean": lambda sizes, options: 1 / (sizes.micros * sizes.micro_tokens),  # by micro-batch (BNPO)
    "sequence_sum": lambda sizes, options: 1 / sizes.rows,  # the mean of rows' sums (LUSPO, where the ratio is a row's)
    "prompt_mean": lambda sizes, options: 1 / (sizes.groups * sizes.group_tokens),  # the mean of groups' means
    "token_sum": lambda sizes, options: torch.ones(()),
}
# No library says that it does these.
WRONG_REDUCES: dict[str, Callable[[Any, LossOptions], Tensor]] = {
    "mean of means, by share of the rows": lambda sizes, options: sizes.micro_rows / (sizes.rows * sizes.micro_tokens),
    "mean of means, each over all ranks": lambda sizes, options: sizes.ranks / (sizes.micros * sizes.turn_tokens),
    "mean over each rank's own tokens": lambda sizes, options: 1 / (sizes.ranks * sizes.rank_tokens),
    "mean of means, of rows": lambda sizes, options: 1 / (sizes.micros * sizes.micro_rows * sizes.tokens),
    "rows' lengths over padded places": lambda sizes, options: sizes.tokens / (sizes.rows * sizes.width),
    "padded length": lambda sizes, options: 1 / (sizes.rows * sizes.width),
}


def loss(logps: Tensor, batch: Batch, options: LossOptions, entropies: Tensor | None = None) -> Tensor:
    """Return the loss of a whole step, however it is cut."""
    sizes = count_sizes(batch, options)
    mask = torch.ones_like(batch.mask) if "padding trained on" in options.wrong else batch.mask
    how = REDUCES | WRONG_REDUCES
    weights = how[options.reduce](sizes, options)  # (R, 1)
    policy, kl = token_losses(logps, batch, options)
    kl_weights = weights if options.kl_reduce == "same" else how[options.kl_reduce](sizes, options)
    total = ((policy * weights + kl * kl_weights) * mask).sum()
    if options.nll_weight:
        right = batch.mask * (batch.rewards > 0)[:, None]  # (R, T)
        total = total - options.nll_weight * (logps * right).sum() / right.sum()
    if entropies is not None:
        total = total - options.entropy_coef * (entropies * batch.mask * weights).sum()
    return -total if "wrong sign" in options.wrong else total


def read_logits(logits: Tensor, ids: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the words that were drawn, and entropies: (R, T, V), (R, T) -> (R, T), (R, T)."""
    divided = "log-probabilities divided by the temperature" in options.wrong
    words = (logits if divided else logits / options.temperature).log_softmax(-1)  # (R, T, V)
    logps = words.gather(-1, ids[..., None])[..., 0]  # (R, T)
    return (logps / options.temperature if divided else logps), -(words.exp() * words).sum(-1)


def gradient(batch: Batch, options: LossOptions) -> tuple[float, Tensor]:
    """Return the loss and its gradient by the log-probabilities (R, T), or by the logits (R, T, V) where given."""
    leaf = (batch.logps if batch.logits is None else batch.logits).clone().requires_grad_()
    logps, entropies = (leaf, None) if batch.ids is None else read_logits(leaf, batch.ids, options)
    value = loss(logps, batch, options, entropies)
    return value.item(), torch.autograd.grad(value, leaf)[0]


# 3. Advantages, (R,).
def advantages(batch: Batch, options: LossOptions) -> Tensor:
    """Return the advantages that the rewards give; 0 in a group of one."""
    total, group = batch.rewards, batch.group[:, None] == batch.group
    others = group & ~torch.eye(len(total), dtype=torch.bool)
    base = textbook.mean(total, others if "mean of the others" in options.wrong else group)
    divisor = textbook.SCALES[options.scale](total, group, torch.ones_like(group))
    if "deviation of the others" in options.wrong:
        divisor = textbook.deviation(total, others) + 1e-6
        base = textbook.mean(total, others)
    if "deviation by n, not n - 1" in options.wrong:
        counts = (group & ~total.isnan()).sum(1)
        divisor = textbook.deviation(total, group) * ((counts - 1) / counts).sqrt() + textbook.SMALL
    result = ((total - base) / divisor).nan_to_num(nan=0.0)
    alone = group.sum(1) == 1
    return torch.where(alone & ("a group of one keeps its reward" in options.wrong), batch.rewards, result)
