"""What the gradient of the logits tells of a trainer's scores: their temperature, and the tokens that they are for.

Of a score log-softmax(z / T) the gradient is, at every token but the scored one, a share of softmax(z / T): its
logarithm is a line over z with the slope 1 / T. The scored token's own entry is minus the sum of all others, and so has
another sign.
"""

import dataclasses
import math

import torch

from failurelab.failures.predicates import Value

_READ = 8  # entries of a row of the gradient
_OFF = 0.02  # share by which the temperatures of rows may differ
_FIT = 0.9  # share of the rows that must have one temperature

_ROWS = 32  # at most so many rows of the gradient are compared with the input
_AGREE = 0.95  # share of them that one shift must explain


@dataclasses.dataclass(frozen=True)
class ScoredRows:
    """Which rows of logits were used, and for which tokens.

    Attributes:
        made: rows of logits for each sequence.
        needed: rows from the first that was used on.
        size: bytes of all the logits.
        scored: rows of the gradient that could be read.
        shift: distance, in positions, from the next token to the token that a row was scored against; 0 is right;
            None if no single shift explains the rows, or no row could be read.
    """

    made: int = 0
    needed: int = 0
    size: int = 0
    scored: int = 0
    shift: int | None = None

    @property
    def figures(self) -> dict[str, Value]:
        """What the registry's F3a and F3b are about; rows that no single shift explains are off by any number."""
        off = None if not self.scored else math.inf if self.shift is None else self.shift
        return {
            "rows_made": self.made, "rows_needed": self.needed, "rows_scored": self.scored, "positions_off": off,
        }  # fmt: skip


def scoring_temperature(logits: torch.Tensor, gradient: torch.Tensor) -> float | None:
    """Return the temperature at which a trainer has scored its tokens, read from the gradient of its logits.

    The gradient of log-softmax(logits / T) is, for every token but the scored one, a share of softmax(logits / T). So
    its logarithm is a line over the logits, with the slope 1 / T, whatever the advantages, and whatever else of the
    loss reaches the logits by the score of the token alone, such as the KL term. An entropy bonus and a loss for all of
    the vocabulary do not: there the logarithms lie on no line, and rows do not agree on its slope.

    Args:
        logits: (batch, rows, vocabulary), as the model returned them.
        gradient: of the loss by these, of the same shape.

    Returns:
        The median over the rows that could be read; None if none could, or if the gradient is not that of scores.
    """
    dtype = min(logits.dtype, gradient.dtype, key=lambda each: each.itemsize)
    rounding = 4 * max(torch.finfo(dtype).eps, 1e-6)  # of a gradient, as a share of it
    logits, gradient = logits.detach().flatten(0, -2).double(), gradient.detach().flatten(0, -2).double()
    used = gradient.abs().amax(-1) > 0
    logits, gradient = logits[used], gradient[used]  # (rows, vocabulary)
    if not len(logits):
        return None
    scored = gradient.abs().argmax(-1, keepdim=True)  # minus the sum of all others
    sign = -gradient.gather(-1, scored).sign()
    logits = logits.scatter(-1, scored, -math.inf)
    x, where = logits.topk(min(_READ, logits.shape[-1] - 1), -1)  # where the gradient is large enough to be read
    y = (gradient.gather(-1, where) * sign).log()  # NaN or -inf where the gradient is no share of a softmax
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    slopes = (x * y).sum(-1) / (x * x).sum(-1)
    off_line = (y - slopes[:, None] * x).square().mean(-1).sqrt()
    # logits that are nearly alike give no slope, and any form of a gradient fits them
    spread = (x * x).sum(-1).sqrt()
    read = (slopes > 0) & y.isfinite().all(-1) & (rounding / spread < _OFF * slopes / 2)
    if not read.any():
        return None
    temperature = 1 / slopes[read].median()
    fits = (off_line[read] <= rounding) & ((slopes[read] * temperature - 1).abs() <= _OFF)
    return float(temperature) if fits.double().mean() >= _FIT else None


def read_scored_rows(gradient: torch.Tensor, ids: torch.Tensor) -> ScoredRows | None:
    """Return which rows were used, and against which token each was scored; None where that cannot be read.

    `gradient` is that of the logits, (batch, rows, vocabulary); `ids` are (batch, tokens).
    """
    gradient = gradient.detach()
    most, least = gradient.amax(-1), gradient.amin(-1)  # (batch, rows)
    used = (most != 0) | (least != 0)
    if not used.any() or not (most + least).isfinite().all():
        return None
    made = gradient.shape[1]
    first = int(used.any(0).nonzero()[0])
    batch, row = (indices[:: max(1, len(indices) // _ROWS)] for indices in used.nonzero(as_tuple=True))
    read = gradient[batch, row]  # (read, vocabulary)
    # The scored token's entry is the largest in size: it is minus the sum of all others.
    positive = read.amax(-1) >= -read.amin(-1)
    token = torch.where(positive, read.argmax(-1), read.argmin(-1))
    alone = torch.where(positive, (read > 0).sum(-1), (read < 0).sum(-1)) == 1
    batch, token = batch[alone], token[alone]
    follows = row[alone] + ids.shape[1] - made + 1  # the column that this row's own next token stands in
    return ScoredRows(
        made=made,
        needed=made - first,
        size=gradient.numel() * gradient.element_size(),
        scored=len(token),
        shift=_find_shift(ids.to(token.device), batch, follows, token),
    )


def _find_shift(ids: torch.Tensor, batch: torch.Tensor, follows: torch.Tensor, token: torch.Tensor) -> int | None:
    """Return the smallest shift that explains which tokens the rows were scored against, or None; 0 is right.

    `ids` are (batch, tokens); the others are (read): the row's place in the batch, the column of its own next token,
    and the token it was scored against.
    """
    length = ids.shape[1]
    for shift in sorted(range(-length, length), key=abs):
        column = follows + shift
        inside = (column >= 0) & (column < length)
        same = inside & (ids[batch, column.clamp(0, length - 1)] == token)
        if len(token) and same.float().mean() >= _AGREE:
            return shift
    return None
