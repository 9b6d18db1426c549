"""The temperature that tokens were scored at, read from the gradient of their logits; and one that is planted."""

import torch

PLANTED = 0.7  # a temperature for the control
_OFF = 0.02  # of the temperatures of several rows; less changes no log-probability that training would notice
_ROWS = 8  # of logits that are read, those with the largest gradient
_STRAIGHT = 0.99  # correlation from which on the logarithms lie on a line


def read_temperature(rows: torch.Tensor, gradient: torch.Tensor) -> float | None:
    """Return the temperature at which tokens were scored; None where the gradient is not that of such scores.

    `rows` are logits and `gradient` is theirs, both (batch, rows, vocabulary).
    """
    rows, gradient = (each.detach().float().flatten(0, 1) for each in (rows, gradient))  # (all rows, vocabulary)
    size = gradient.abs()
    largest, scored = size.max(-1)  # the scored token's entry is minus the sum of all others
    read = []
    for row in largest.argsort(descending=True)[:_ROWS].tolist():
        others = size[row] > 0
        others[scored[row]] = False
        if largest[row] == 0 or others.sum() < 3:
            continue
        z, log = rows[row, others].double(), size[row, others].double().log()
        z, log = z - z.mean(), log - log.mean()
        spread = (z * z).sum() * (log * log).sum()
        if spread > 0 and (z * log).sum() / spread.sqrt() >= _STRAIGHT:
            read.append(((z * z).sum() / (z * log).sum()).item())
    if not read or max(read) - min(read) > 2 * _OFF * min(read):
        return None
    return sorted(read)[len(read) // 2]


def plant_temperature(rows: torch.Tensor) -> float | None:
    """Score the likeliest token of each row at another temperature, and return the one that is read."""
    with torch.enable_grad():
        planted = rows.detach()[:, :_ROWS].float().requires_grad_()
        scores = (planted / PLANTED).log_softmax(-1).max(-1).values
        (gradient,) = torch.autograd.grad(scores.sum(), planted)
    return read_temperature(planted, gradient)
