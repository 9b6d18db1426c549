"""What people make wrong in RLOO and in Online DPO: the suspects of each, beside those that GRPO shares with them."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from failurelab.textbook.apart import norm
from failurelab.textbook.definition_online_dpo import PREFERENCES, compared, prefer, total_of
from failurelab.textbook.definition_rloo import RLOO, leave_one_out, normalized, penalized
from failurelab.textbook.fields import Options
from failurelab.textbook.gradient import advantages
from failurelab.textbook.rows import Row, Scoring
from failurelab.textbook.suspects import OTHERS, SCORES, Search, Suspect, Suspects

MASKS = (
    "mask shifted",
    "first token left out",
    "last token left out",
    "padding is trained on",
)
SAME = 3e-5  # nats between a policy and a reference that is the same
FITS = 4  # passes in which a number is fitted


def _named(some: Sequence[Suspect], *names: str) -> tuple[Suspect, ...]:
    return tuple(suspect for suspect in some if suspect.name in names)


def _is_unscored(rows: Sequence[Row], options: Options) -> bool:
    return any(all(value is None or math.isnan(value) for value in row.rewards) for row in rows)


def _is_penalized(rows: Sequence[Row], options: Options) -> bool:
    return bool(options.kl_in_reward) and any(row.kl for row in rows)


def _none_as_zero(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.masked_fill(rewards.isnan().all(1, keepdim=True), 0.0)


# RLOO: functions of rewards (R, F), group and batch (R, R), log(policy / reference) of the completions (R,).
def _no_baseline(rewards: Any, group: Any, batch: Any, kl: Any, options: Options) -> torch.Tensor:
    return normalized(penalized(rewards, kl, options), batch, options)


def _own_in_baseline(rewards: Any, group: Any, batch: Any, kl: Any, options: Options) -> torch.Tensor:
    total = penalized(rewards, kl, options)
    return normalized(total - torch.where(group, total.nan_to_num(), 0.0).sum(1) / group.sum(1), batch, options)


def _otherwise(advantages: Callable[..., torch.Tensor], name: str, value: Callable[[Options], Any]) -> dict[str, Any]:
    """Return the change to advantages by another value of an option."""

    def changed(*given: Any) -> torch.Tensor:
        other: dict[str, Any] = {name: value(given[-1])}
        return advantages(*given[:-1], dataclasses.replace(given[-1], **other))

    return {"advantages": changed}


def _factors_of_rloo(rows: Sequence[Row], options: Options) -> Iterator[tuple[str, str, float]]:
    """With the row itself in the baseline, its advantage is that of RLOO times (k - 1) / k, for k completions."""
    sizes = {sum((row.batch, row.group) == (other.batch, other.group) for other in rows) for row in rows}
    if len(sizes) == 1 and not options.normalize_advantages:
        (size,) = sizes
        yield "baseline", "the completion itself is in it", (size - 1) / size
    asked = options.normalize_advantages
    own, other = (
        float(advantages(rows, dataclasses.replace(options, normalize_advantages=normalize), RLOO).norm())
        for normalize in (asked, not asked)
    )
    if own and other:  # the mean of all is 0 in any case, where each completion has a reward
        yield "normalize_advantages", "left out" if asked else "without being asked for", other / own


OF_RLOO = Suspects(
    others=(
        *_named(OTHERS, *MASKS, "ratio", "clipping"),
        Suspect("no baseline", "the mean of the others is not subtracted", {"advantages": _no_baseline}),
        Suspect("baseline", "the completion itself is in it", {"advantages": _own_in_baseline}),
        Suspect(
            "completions without any reward",
            "count as 0",
            {"advantages": lambda rewards, *more: leave_one_out(_none_as_zero(rewards), *more)},
            _is_unscored,
            "TRL #5902",
        ),
        Suspect(
            "KL divergence", "left out", _otherwise(leave_one_out, "kl_in_reward", lambda options: 0.0), _is_penalized
        ),
        Suspect(
            "KL divergence",
            "opposite sign",
            _otherwise(leave_one_out, "kl_in_reward", lambda options: -options.kl_in_reward),
            _is_penalized,
        ),
        Suspect(
            "reward_clip_range",
            "left out",
            _otherwise(leave_one_out, "reward_clip_range", lambda options: None),
            lambda rows, options: options.reward_clip_range is not None,
        ),
        Suspect(
            "normalize_advantages",
            "left out",
            _otherwise(leave_one_out, "normalize_advantages", lambda options: False),
            lambda rows, options: options.normalize_advantages,
        ),
        Suspect(
            "normalize_advantages",
            "without being asked for",
            _otherwise(leave_one_out, "normalize_advantages", lambda options: True),
            lambda rows, options: not options.normalize_advantages,
        ),
        Suspect(
            "divided by a completion's tokens",
            "",
            {
                "log_ratio": lambda difference, mask, options: (
                    (difference * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
                )
            },
        ),
    ),
    factors=_factors_of_rloo,
)


# Online DPO: functions of rewards (R, F), group and batch (R, R), whether completions were cut (R,).
def _fitted_beta(search: Search) -> list[Suspect]:
    """Return the suspect that beta is another number, which fits the gradient's size best."""
    asked, beta = search.options.beta, search.options.beta
    power = {"sigmoid": 1, "ipo": -1}[search.options.loss_type]  # of beta, in the size of a gradient of small margins
    for _ in range(FITS):
        other = search.gradient(dataclasses.replace(search.options, beta=beta), definition=search.definition)
        ratio = norm(search.theirs) / (norm(other) or math.inf)
        if not 1e-6 < ratio < 1e6:
            return []
        beta *= ratio**power
    if not math.isfinite(beta) or abs(beta / asked - 1) < 1e-3:
        return []
    change = {"preference": lambda margin, options: PREFERENCES[options.loss_type](margin, beta)}
    return [Suspect("beta", f"{beta:.3g} in place of {asked:.3g}", change)]


def _other_loss(margin: torch.Tensor, options: Options) -> torch.Tensor:
    (other,) = set(PREFERENCES) - {options.loss_type}
    return PREFERENCES[other](margin, options.beta)


def _has_ties(rows: Sequence[Row], options: Options) -> bool:
    pairs = zip(rows[::2], rows[1::2])
    return any(one.rewards == other.rewards for one, other in pairs)


OF_ONLINE_DPO = Suspects(
    scores=(
        *(suspect for suspect in _named(SCORES, "scores shifted by one", "rows of the prompt", "no attention mask")),
        Suspect(
            "temperature of the sampling",
            "the policy itself has none",
            {"scoring": lambda options, pad: Scoring(options.asked_temperature, pad=pad)},
            lambda rows, options: options.asked_temperature not in (0.0, 1.0),
        ),
    ),
    others=(
        *_named(OTHERS, *MASKS),
        Suspect("chosen and rejected swapped", "", {"advantages": lambda *given: -prefer(*given)}),
        Suspect(
            "ties",
            "the second one is the chosen one",
            {
                "advantages": lambda rewards, group, batch, cut, options: compared(
                    total_of(rewards, cut, options), group, torch.greater
                )
            },
            _has_ties,
        ),
        Suspect(
            "completions without any reward",
            "count as 0",
            {"advantages": lambda rewards, *more: prefer(_none_as_zero(rewards), *more)},
            _is_unscored,
            "TRL #5902",
        ),
        Suspect(
            "a failed judgement",
            "counts for the second completion",
            {
                "advantages": lambda rewards, group, batch, cut, options: torch.where(
                    rewards.isnan().all(1),
                    compared(torch.zeros(len(rewards)), group, torch.greater),
                    prefer(rewards, group, batch, cut, options),
                )
            },
            _is_unscored,
        ),
        Suspect(
            "missing_eos_penalty",
            "left out",
            _otherwise(prefer, "missing_eos_penalty", lambda options: None),
            lambda rows, options: bool(options.missing_eos_penalty),
        ),
        Suspect("reference left out", "", {"reference": torch.zeros_like}),
        Suspect("loss_type", "the other one", {"preference": _other_loss}),
        Suspect(
            "divided by a completion's tokens",
            "",
            {"whole": lambda log_ratio, mask: (log_ratio * mask).sum(1) / mask.sum(1).clamp(min=1)},
        ),
    ),
    opposite=lambda tally: "chosen and rejected swapped" if tally.apart <= SAME else "opposite sign",
    fitted=_fitted_beta,
)

SUSPECTS: Mapping[str, Suspects] = {"RLOO": OF_RLOO, "Online DPO": OF_ONLINE_DPO}


def suspects_of(name: str) -> Suspects:
    """Return the suspects of an algorithm, by the name of its definition."""
    return SUSPECTS.get(name, Suspects())
