"""Advantages by GRPO's definition: how much better a completion is than the others of its group.

    A = (reward - mean of the group) / (standard deviation of the group + 1e-4)

DeepSeekMath (arXiv 2402.03300), equation 8 with outcome supervision; the unbiased standard deviation and the 1e-4 are
what every release of trl documents by its formula. `batch` and `none` in place of the group's deviation: PPO Lite
(arXiv 2508.08221) and Dr. GRPO (2503.20783). Several functions: weighted sum first, or each normalized first (GDPO,
arXiv 2601.05242). A function that returns None for a row does not count for it.
"""

import math
from collections.abc import Sequence

import torch

from failurelab.textbook.fields import Options
from failurelab.textbook.rows import Row

SMALL = 1e-4  # added to a standard deviation, so that equal rewards do not divide by zero


def reward_table(rows: Sequence[Row]) -> torch.Tensor:
    """Return the rewards (rows, functions), NaN where a function gave none."""
    return torch.tensor(
        [[math.nan if value is None else float(value) for value in row.rewards] for row in rows], dtype=torch.float64
    )


def advantages(rows: Sequence[Row], options: Options, small: float = SMALL, *, baseline: bool = True) -> torch.Tensor:
    """Return the advantages (rows,), in float64; 0 for a completion that no function scored.

    Without `baseline`, and with a `small` other than SMALL, they are a suspect's.
    """
    table = reward_table(rows)  # (rows, functions)
    groups = [torch.tensor(places) for places in _places([(row.batch, row.group) for row in rows])]
    batches = [torch.tensor(places) for places in _places([row.batch for row in rows])]
    unscored = table.isnan().all(1)  # (rows,); before an infinite reward makes others of its group NaN
    if options.multi_objective_aggregation == "normalize_then_sum":
        for places in groups:
            values = table[places]  # (generations, functions)
            spread = torch.stack([_deviation(column) for column in values.T])
            table[places] = (values - values.nanmean(0)) / (spread + small)
        return _center(_sum(table, unscored, options), batches, batches, small)
    scaled = {"group": groups, "batch": batches}.get(options.scale_rewards, [])
    return _center(_sum(table, unscored, options), groups if baseline else [], scaled, small)


def _center(total: torch.Tensor, groups: list[torch.Tensor], scaled: list[torch.Tensor], small: float) -> torch.Tensor:
    """Return rewards less the mean of their group, by the deviation of what they are scaled with."""
    centered = total.clone()
    for places in groups:
        centered[places] -= total[places].nanmean()
    for places in scaled:
        centered[places] /= _deviation(total[places]) + small
    return centered.nan_to_num(nan=0.0)


def rounding(rows: Sequence[Row], options: Options) -> float:
    """Return how large an advantage may be in float32 where all rewards of a group are equal: their mean is rounded."""
    weights = options.reward_weights or (1.0,) * len(rows[0].rewards)
    largest = float((reward_table(rows).nan_to_num().abs() @ torch.tensor(weights, dtype=torch.float64).abs()).max())
    return 2 * torch.finfo(torch.float32).eps * largest / (1.0 if options.scale_rewards == "none" else SMALL)


def _sum(table: torch.Tensor, unscored: torch.Tensor, options: Options) -> torch.Tensor:
    """Return the weighted sum (rows,) over the functions of a table; NaN where none scored, unless that counts as 0."""
    weights = torch.tensor(options.reward_weights or (1.0,) * table.shape[1], dtype=table.dtype)
    total = (table * weights).nansum(1)
    return total if options.unscored_are_zero else total.masked_fill(unscored, math.nan)


def _deviation(values: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation of what is not NaN."""
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else torch.zeros((), dtype=values.dtype)


def _places(keys: Sequence[object]) -> list[list[int]]:
    """Return, for each key, the places that have it."""
    places: dict[object, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())
