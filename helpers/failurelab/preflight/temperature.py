"""The temperature that tokens were scored at, read from the gradient of their logits; and one that is planted."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from failurelab.handles import is_unseen, wrap_method
from failurelab.preflight.inputs import Seen

PLANTED = 0.7  # a temperature for the control
_OFF = 0.02  # of the temperatures of several rows; less changes no log-probability that training would notice
_ROWS = 8  # of logits that are read, those with the largest gradient
_SMALL = 1e-4  # of the largest gradient: a row with less may be rounding
_STRAIGHT = 0.99  # correlation from which on the logarithms lie on a line


def read_temperature(rows: torch.Tensor, gradient: torch.Tensor) -> float | None:
    """Return the temperature at which tokens were scored; None where the gradient is not that of such scores.

    Rows whose score is to rise and rows whose score is to fall are read: another term of the loss, such as an entropy
    bonus, makes the temperature of the first look smaller and that of the others larger.

    Args:
        rows: logits, (batch, rows, vocabulary).
        gradient: of the loss by them, of the same shape.
    """
    rows, gradient = (each.detach().float().flatten(0, 1) for each in (rows, gradient))  # (all rows, vocabulary)
    size = gradient.abs()
    largest, scored = size.max(-1)  # the scored token's entry is minus the sum of all others
    order = largest.argsort(descending=True)
    order = order[largest[order] > _SMALL * largest.max()]
    signs = gradient[order].sign() * gradient[order, scored[order]].sign()[:, None]
    if ((signs > 0).sum(-1) > 1).any():  # of a score all other tokens fall where this one rises; not so of an entropy
        return None
    rises = gradient[order, scored[order]] < 0
    read = []
    for row in torch.cat([order[rises][: _ROWS // 2], order[~rises][: _ROWS // 2]]).tolist():
        others = size[row] > 0
        others[scored[row]] = False
        if others.sum() < 3:
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


class Temperatures:
    """Notes in `seen` the temperatures of the cut training: generate() is handed one, and scores have one."""

    def __init__(self, seen: Seen):
        self._seen, self._model = seen, seen.trainer.model

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the training is listened to."""
        with contextlib.ExitStack() as stack:
            # before hooks of the script, which may divide the logits as a trainer would
            stack.enter_context(self._model.register_forward_hook(self._read_scores, prepend=True))
            if callable(getattr(self._model, "generate", None)):
                stack.enter_context(wrap_method(self._model, "generate", self._read_sampling, "watched"))
            yield

    def _read_sampling(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or getattr(generate.__self__, "generation_config", None)
        if self._seen.drawn_at is None and kwargs.get("do_sample", getattr(config, "do_sample", False)):
            self._seen.drawn_at = kwargs.get("temperature", getattr(config, "temperature", None))
        return generate(*args, **kwargs)

    def _read_scores(self, model: Any, args: tuple, output: Any) -> None:
        rows = getattr(output, "logits", None)
        if is_unseen() or not torch.is_grad_enabled() or not isinstance(rows, torch.Tensor) or rows.dim() != 3:
            return
        if rows.requires_grad and self._seen.scored_at is None:
            kept = rows.detach().clone()  # which the trainer may divide in place
            rows.register_hook(lambda gradient: self._read_gradient(kept, gradient))

    def _read_gradient(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Read the temperature of the scores; both are (batch, rows, vocabulary)."""
        if self._seen.scored_at is None and gradient.shape == rows.shape:
            self._seen.scored_at = read_temperature(rows, gradient)
            if self._seen.scored_at is not None:
                self._seen.scored_planted = plant_temperature(rows)
