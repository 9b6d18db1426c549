"""Two engines, two policies: the engine that generates gives its tokens other probabilities than the trainer does.

Rollouts come from an engine of its own (vLLM, a server, a copy of the model), and the trainer scores them with the
weights that it trains. The two must be one policy. They are not where the scores leave out the temperature of the
sampling (trl 0.14 and 0.15), where the engine's weights are old, where it computes in another dtype, or where the
tokens are not those that were drawn (text decoded and encoded again). Nothing raises an error.

`compare` measures the gap for each token. `importance_weights` are what trl 1.16 makes of it under `use_vllm`:
w = exp(sum of log-ratios) for a whole sequence, and 0 where w is above 3. The log-ratios of a sequence add up, so
rounding alone takes more sequences, and more of the effective sample size, the longer they are.

Under `use_vllm` trl logs the mean gap itself; `read_log` tells from a run's log whether the engine is the policy.

Upstream: TRL #3029, #4159 (temperature), #2698, #5312 (weights never synced; kin: verl #4248, #3461), #5814, #4772 (one
weight for a whole sequence), #5224 (encoded again).
"""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from failurelab.errors import FailureLabError
from failurelab.failures.predicates import Value
from failurelab.measure.scores import scoring_temperature

__all__ = [
    "LARGEST_MEAN",
    "LOGGED",
    "MODES",
    "EngineAnswerError",
    "Gap",
    "LoggedGap",
    "compare",
    "compares_pairs",
    "effective_sample_size",
    "importance_weights",
    "other_weights",
    "read_log",
    "scoring_temperature",
    "temperature_figures",
]

LARGEST_MEAN = 0.05
"""Of healthy gaps, in nats a token. Rounding alone makes 0.002 to 0.03 (bfloat16 engines of 0.5 to 4 billion parameters
in public threads, TRL #5312, #6789), an engine that keeps its first weights 0.8 after ten steps (#5312)."""
LOGGED = "sampling/sampling_logp_difference/mean"
"""What trl logs the gap by, from 0.23 on, under `use_vllm` with `vllm_importance_sampling_correction` (the default)."""

MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")


class EngineAnswerError(FailureLabError):
    """The engine's log-probabilities cannot be compared: they are missing, too few, too many, or no numbers."""


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far the engine's log-probabilities are from the policy's, over the tokens that count.

    Attributes:
        mean: of the absolute differences, in nats a token.
        largest: of them.
        masked: share of sequences that trl 1.16's default leaves out of the loss.
        effective: effective sample size of the sequences' importance weights, before any cap, as a share of them.
        tokens: of the longest sequence.
    """

    mean: float
    largest: float
    masked: float
    effective: float
    tokens: int = 0

    @property
    def figures(self) -> dict[str, Value]:
        """What the registry's F16 and F17 are about."""
        return {"policy_gap": self.mean, "effective_batch": self.effective, "tokens_drawn": self.tokens}

    def __str__(self) -> str:
        return (
            f"{self.mean:.3g} nats a token in the mean, {self.largest:.3g} at most; the effective sample size is "
            f"{self.effective:.0%} of the sequences, and a cap of 3 leaves out {self.masked:.0%}"
        )


def importance_weights(
    policy_logps: torch.Tensor,
    engine_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "sequence_mask",
    cap: float | None = 3.0,
    floor: float | None = None,
) -> torch.Tensor:
    """Return the importance weights that trl 1.16 multiplies the loss with under `use_vllm`.

    Source: `_generate_and_score_completions` in trl 1.16.0's grpo_trainer.py; a test holds them together.

    Args:
        policy_logps: of the completions' tokens by the trainer, (batch, tokens), at the sampling's temperature.
        engine_logps: of the same tokens by the engine that drew them, (batch, tokens); where one is NaN, the token
            counts as if both agreed, as in trl.
        mask: 1 for a token that counts, (batch, tokens).
        mode: one of MODES; trl's `vllm_importance_sampling_mode`.
        cap: the largest weight, `vllm_importance_sampling_clip_max`; None is no cap.
        floor: the smallest weight, `vllm_importance_sampling_clip_min`.

    Returns:
        (batch, 1) for a sequence's weight, (batch, tokens) for those of its tokens; 0 where `mask` modes leave out.

    Raises:
        EngineAnswerError: the shapes differ.
        ValueError: another mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of: {', '.join(MODES)}")
    _same_shape(policy_logps, engine_logps, mask)
    log_ratios = ((policy_logps - engine_logps) * mask).nan_to_num(nan=0.0)  # (batch, tokens)
    if mode.startswith("sequence"):
        log_ratios = log_ratios.sum(-1, keepdim=True)  # (batch, 1)
    weights = log_ratios.exp()
    if mode.endswith("truncate"):
        return weights if cap is None and floor is None else weights.clamp(floor, cap)
    outside = (weights < (-math.inf if floor is None else floor)) | (weights > (math.inf if cap is None else cap))
    return weights.masked_fill(outside, 0.0)


def effective_sample_size(weights: torch.Tensor) -> float:
    """Return (sum of w)² / (n x sum of w²), a share from 0 to 1: how much of a batch its weights leave.

    1 where all weights are equal, 1/n where one outweighs all others, 0 where all are 0.
    """
    weights = weights.double().flatten()
    largest = weights.max() if len(weights) else 0.0
    if not largest > 0:
        return 0.0
    weights = weights / largest  # their squares may be too large for a float otherwise
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def compare(policy_logps: torch.Tensor, engine_logps: torch.Tensor | None, mask: torch.Tensor) -> Gap:
    """Compare the engine's log-probabilities with the policy's, token by token.

    Args:
        policy_logps: of the completions' tokens by the trainer, (batch, tokens), in nats.
        engine_logps: of the same tokens by the engine; None if it gave none.
        mask: 1 for a token that counts, (batch, tokens).

    Raises:
        EngineAnswerError: there are none, of another shape, or one is no finite number where the mask is 1.
    """
    if engine_logps is None:
        raise EngineAnswerError("the engine gives no log-probabilities. Next: ask it for those of the tokens it drew")
    _same_shape(policy_logps, engine_logps, mask)
    counts = mask.bool()
    if not counts.any():
        raise EngineAnswerError("no token of the batch counts: the mask is all 0, so there is nothing to compare")
    policy, engine = policy_logps.detach().double(), engine_logps.detach().double().to(policy_logps.device)
    wrong = int((~engine[counts].isfinite()).sum())
    if wrong:
        raise EngineAnswerError(
            f"{wrong} of the engine's {int(counts.sum())} log-probabilities are no finite numbers. trl takes the "
            "weight of such a token for 1"
        )
    difference = torch.where(counts, policy - engine, 0.0)
    weights = importance_weights(policy, engine, counts, cap=None)
    return Gap(
        mean=float(difference.abs()[counts].mean()),
        largest=float(difference.abs().max()),
        masked=float((weights > 3.0).double().mean()),
        effective=effective_sample_size(weights),
        tokens=int(counts.sum(-1).max()),
    )


@dataclasses.dataclass(frozen=True)
class LoggedGap:
    """What a log says of the gap: mean absolute difference of the log-probabilities, in nats a token.

    Attributes:
        first: the smallest of the first three logged: the engine begins with the policy's weights.
        last: the mean of the last three.
        steps: of the first and of the last row.
    """

    first: float
    last: float
    steps: tuple[int, int]

    @property
    def looks_like(self) -> str:
        """`stale` where a healthy gap has grown, `unknown` where it was large from the start, empty where it is well.

        Large from the start are another temperature, other tokens and an adapter that is left out: a log does not tell
        these apart, and `guards.EngineMismatchGuard` does.
        """
        if not self.last > LARGEST_MEAN:
            return ""
        return "stale" if self.first <= LARGEST_MEAN and self.last >= 2 * self.first else "unknown"

    def __str__(self) -> str:
        first, last = self.steps
        return f"{LOGGED} is {self.first:.3g} nats at step {first} and {self.last:.3g} at step {last}"


def temperature_figures(scored: float | None, drawn: float) -> dict[str, Value]:
    """Return what the registry's F15 is about: temperatures at which tokens are scored, as was read, and drawn."""
    return {
        "temperature_asked": abs(drawn - 1),
        "temperature_off": None if scored is None else abs(scored / drawn - 1),
    }


@contextlib.contextmanager
def other_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let the model have other weights, by name, for a block."""
    named = dict(model.named_parameters())
    before = {name: named[name].data for name in weights}
    try:
        for name, other in weights.items():
            named[name].data = other.to(before[name])
        yield
    finally:
        for name, data in before.items():
            named[name].data = data


def read_log(rows: Iterable[Mapping[str, Any]]) -> LoggedGap | None:
    """Tell from a run's log whether the engine that generates is the policy that is trained.

    Args:
        rows: `trainer.state.log_history`, or `log_history` of a trainer_state.json.

    Returns:
        None where the log has no such figure: no vLLM, trl before 0.23, or the correction switched off.
    """
    found = [(int(row.get("step", 0)), row[LOGGED]) for row in rows if isinstance(row.get(LOGGED), int | float)]
    found = [(step, float(gap)) for step, gap in found if math.isfinite(gap)]
    if not found:
        return None
    count = min(3, max(1, len(found) // 2))  # a single batch is noisy
    gaps = [gap for _, gap in found]
    return LoggedGap(min(gaps[:count]), statistics.fmean(gaps[-count:]), (found[0][0], found[-1][0]))


def compares_pairs(options: Mapping[str, Any]) -> bool:
    """Whether a trainer uses DPO's loss on pairs of completions, and no policy gradient.

    DPO's implicit reward is by its definition a log-ratio at temperature 1, whatever temperature the pair was
    drawn at. Online DPO draws at 0.9 by default, in every release of trl, and scores at 1; that is right.

    Args:
        options: the options of the trainer's config by name, such as `vars(args)`.
    """
    return options.get("loss_type") in ("sigmoid", "ipo")


def _same_shape(policy_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
    if not policy_logps.shape == engine_logps.shape == mask.shape:
        raise EngineAnswerError(
            f"the policy's log-probabilities are {tuple(policy_logps.shape)}, the engine's "
            f"{tuple(engine_logps.shape)}, the mask {tuple(mask.shape)}: one for each token of each completion is "
            "needed. Next: look whether the engine's tokens are those that the trainer was given"
        )
