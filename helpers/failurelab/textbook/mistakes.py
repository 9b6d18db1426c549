"""What people make wrong in RLOO and in Online DPO: the suspects of each, beside those that GRPO shares with them.

What else gives rows other weights needs no name here: `solve` tells which.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from failurelab.textbook.apart import SAME
from failurelab.textbook.definition_online_dpo import compared, prefer
from failurelab.textbook.definition_rloo import RLOO, leave_one_out
from failurelab.textbook.fields import Options
from failurelab.textbook.gradient import advantages
from failurelab.textbook.rows import Row, Scoring
from failurelab.textbook.suspects import OTHERS, SCORES, Suspect, Suspects, count_as_zero, is_unscored

MASKS = (
    "mask shifted",
    "first token left out",
    "last token left out",
    "padding is trained on",
)


def _named(some: Sequence[Suspect], *names: str) -> tuple[Suspect, ...]:
    return tuple(suspect for suspect in some if suspect.name in names)


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
        Suspect(
            "completions without any reward",
            "count as 0",
            {"advantages": lambda rewards, *more: leave_one_out(count_as_zero(rewards), *more)},
            is_unscored,
            "TRL #5902",
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

OF_ONLINE_DPO = Suspects(
    scores=(
        *_named(SCORES, "scores shifted by one", "rows of the prompt", "no attention mask"),
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
            "completions without any reward",
            "count as 0",
            {"advantages": lambda rewards, *more: prefer(count_as_zero(rewards), *more)},
            is_unscored,
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
            is_unscored,
        ),
    ),
    opposite=lambda tally: "chosen and rejected swapped" if tally.apart <= SAME else "opposite sign",
)

SUSPECTS: Mapping[str, Suspects] = {"RLOO": OF_RLOO, "Online DPO": OF_ONLINE_DPO}


def suspects_of(name: str) -> Suspects:
    """Return the suspects of an algorithm, by the name of its definition."""
    return SUSPECTS.get(name, Suspects())
