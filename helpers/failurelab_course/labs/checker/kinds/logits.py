"""The kind `logits`: a trainer, measured as the kind `trainer` is, and which rows of logits its training pass uses.

What goes wrong is in figures that no log shows: rows made and never used (memory), or rows scored against tokens that
do not follow them (silence). Both are read at the model's head in the first training pass, below trainer and model: no
name of a trainer's method is relied on, and rows that are cut away after they were made count as made.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from failurelab._unwrap import unwrap
from failurelab_course.labs.checker.base import CheckRun
from failurelab_course.labs.checker.kinds import trainer as trainer_kind
from failurelab_course.labs.checker.kinds.products import Products

_CLOSE = 1e-3  # nats
_READ = 32  # at most so many rows of one call of the head are compared
_AGREE = 0.95  # share of the rows that one distance must explain


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Build the script's trainer, train it, and fill in `run.metrics`."""
    trainer_kind.measure(script, run, watched)


@contextlib.contextmanager
def watched(trainer: Any, run: CheckRun) -> Iterator[None]:
    """Read the first training pass of a block at the trainer's head, and fill in `run.metrics`."""
    head = _Head(trainer.model, run)
    try:
        with head.products:
            yield
    finally:
        head.remove()
        run.metrics |= head.metrics()


class _Head:
    """Reads the first training pass, when the clean model still has the same weights.

    The rows that the head makes are found among the clean model's, which says where they stand. The gradient of a row
    says which token it was scored against: by log-softmax the scored token's entry has one sign, all others the other.
    The gradient of the hidden states says which rows were used.
    """

    def __init__(self, model: Any, run: CheckRun):
        self._run, base = run, unwrap(model)
        self.products = Products(base.config.vocab_size, self._on_rows)
        self._passes = self._made = self._needed = 0
        self._ids = self._clean = None
        self._found: list[tuple[torch.Tensor, int]] = []  # where a row may stand (batch, tokens), and its token
        self._in_place = False
        self._handles = [
            base.get_decoder().register_forward_hook(self._on_hidden, with_kwargs=True),
            base.register_forward_hook(self._on_output),
        ]

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def metrics(self) -> dict[str, int]:
        """Return what was read; a figure that could not be read is left out."""
        read = {"rows_made": self._made, "rows_needed": self._needed} if self._needed else {}
        distances = sorted(range(-self._ids.shape[1], self._ids.shape[1]), key=abs) if self._found else ()
        off = next((distance for distance in distances if self._explains(distance)), 0 if self._in_place else None)
        return read if off is None else read | {"positions_off": off}

    def _in_first_pass(self) -> bool:
        return self._passes == 1 and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def _on_hidden(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # generation, the reference model, or a second computation for the backward pass
        self._passes += 1
        ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
        hidden = output[0]
        if self._passes > 1 or not isinstance(ids, torch.Tensor) or not hidden.requires_grad:
            return
        self._ids = ids.cpu()
        hidden.register_hook(self._on_gradient_of_hidden)
        mask = mask.cpu() if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else None
        with torch.no_grad():
            rows = self._run.clean(input_ids=self._ids, attention_mask=mask).logits
        counts = torch.ones_like(self._ids) if mask is None else mask
        self._clean = rows.masked_fill(counts[..., None] == 0, torch.nan)

    def _on_gradient_of_hidden(self, gradient: torch.Tensor) -> None:
        used = (gradient != 0).any(-1).any(0)  # (tokens)
        if used.any():
            self._needed = len(used) - int(used.nonzero()[0])

    def _on_rows(self, output: torch.Tensor) -> None:
        if not self._in_first_pass() or self._clean is None:
            return
        self._made += output.numel() // output.shape[-1] // len(self._ids)
        if output.requires_grad:
            logits = output.detach()
            output.register_hook(lambda gradient: self._read(gradient, logits))

    def _read(self, gradient: torch.Tensor, logits: torch.Tensor) -> None:
        """Note where rows stand, and against which token each was scored; both (batch, rows, vocabulary)."""
        gradient, flat = (tensor.detach().cpu().flatten(0, -2) for tensor in (gradient, logits))
        used = gradient.any(-1).nonzero()[:, 0]
        for index in used[:: max(1, len(used) // _READ)].tolist():
            slope = gradient[index]
            token = int(slope.argmax() if slope.amax() >= -slope.amin() else slope.argmin())
            places = (self._clean - flat[index]).abs().amax(-1) < _CLOSE  # (batch, tokens)
            if logits.dim() == 3 and len(logits) == len(places):
                own = torch.zeros_like(places)
                own[index // logits.shape[1]] = True
                places &= own
            if places.any():
                self._found.append((places, token))

    def _explains(self, distance: int) -> bool:
        """Whether rows were scored against the token that many positions after their own next one."""
        ids, length = self._ids, self._ids.shape[1]
        agree = 0
        for places, token in self._found:
            batch, column = places.nonzero(as_tuple=True)
            target = column + 1 + distance
            inside = (target >= 0) & (target < length)
            agree += bool((inside & (ids[batch, target.clamp(0, length - 1)] == token)).any())
        return agree >= _AGREE * len(self._found)

    def _on_output(self, module: Any, args: tuple, output: Any) -> None:
        """Judge a model that answers with log-probabilities in place of logits, (batch, tokens, 1)."""
        scores = getattr(output, "logits", None)
        if self._clean is None or not self._in_first_pass() or scores is None or scores.shape[-1] != 1:
            return
        scored = scores.shape[1]
        rows = self._clean[:, -scored - 1 : -1].log_softmax(-1)
        truth = rows.gather(-1, self._ids[:, -scored:, None])
        self._in_place = bool(((scores.detach().cpu() - truth).abs() < _CLOSE)[~truth.isnan()].all())
