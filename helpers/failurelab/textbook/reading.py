"""Which tokens a forward pass of the loss is for, and the weight of each, read from the gradient of their scores.

That of a row of logits is  weight * (onehot - softmax) / temperature,  so the scored token, the temperature and the
weight, which is the loss's derivative by the token's log-probability, stand in it. A forward pass that gives
log-probabilities in the place of logits tells the weight by itself.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from failurelab._unwrap import unwrap
from failurelab.handles import is_unseen
from failurelab.measure.scores import scoring_temperature
from failurelab.textbook.rows import Ids

LEAST = 1e-6  # of the largest entry of a gradient: what is smaller is rounding
_NEARLY = 0.9  # of the largest entry of a row: the next token's may be as large, where only two are likely
_SURE = 1e-4  # what is left of a token's probability 1: with less its weight cannot be read
_ROOM = 32 * 2**20  # bytes of a gradient that are read at once
_SAMPLE = 256  # rows of logits that the temperature is read from


@dataclasses.dataclass(frozen=True)
class Token:
    """A token that is trained on."""

    place: int  # how many ids the model had read as it scored it
    token: int  # the id that was scored
    weight: float = math.nan  # the loss's derivative by its log-probability; NaN where it is not known
    logp: float = math.nan  # its log-probability there, at the temperature that was drawn at
    at: int = 0  # place among the ids as they were handed over, with padding


@dataclasses.dataclass(frozen=True)
class Trained:
    """A row of a forward pass of the loss: the ids that the model attended to, and the tokens that have a gradient.

    `padded` are the ids as they were handed over, `weights` a number for those of the policy, or None.
    """

    rank: int
    step: int
    row: int
    ids: Ids
    tokens: tuple[Token, ...]
    weights: int | None = None
    padded: Ids = ()
    micro: int = 0

    @functools.cached_property
    def offset(self) -> int | None:
        """How far behind the right row of logits tokens were scored, in positions; None where no one shift says so."""
        for shift in sorted(range(-len(self.padded), len(self.padded)), key=abs):
            places = [(token.at + 1 + shift, token.token) for token in self.tokens]
            same = sum(0 <= at < len(self.padded) and self.padded[at] == own for at, own in places)
            if same >= 0.95 * len(places):
                return shift
        return None


@dataclasses.dataclass
class Pass:
    """A forward pass of the loss."""

    rows: list[Trained]  # with the tokens that have a gradient, in the last backward pass
    attended: list[list[bool]]  # whether each id, as it was handed over, is attended to

    def write(self, found: Sequence[tuple[int, int, int, float, float]]) -> None:
        """Write down the tokens: of each the row, the place of its logits, its id, weight and log-probability."""
        tokens: list[list[Token]] = [[] for _ in self.rows]
        before = [list(itertools.accumulate(each)) for each in self.attended]
        for number, at, token, weight, logp in found:
            tokens[number].append(Token(before[number][at], token, weight, logp, at))
        self.rows = [dataclasses.replace(row, tokens=tuple(own)) for row, own in zip(self.rows, tokens)]


class Reader:
    """Listens to the forward passes of a model in which a graph is made, and reads each in its backward pass.

    Args:
        policy: the model, without what accelerate puts around it.
        when: gives what is noted of the rows of a pass that begins, by name; None: it is not read.
        drawn_at: gives the temperature that tokens were drawn at.
        safely: calls a function with arguments, whatever it raises.
        problem: is told why a pass cannot be read.
    """

    def __init__(
        self,
        policy: Any,
        when: Callable[[], dict[str, Any] | None],
        drawn_at: Callable[[], float],
        safely: Callable[..., None],
        problem: Callable[[str], None] = lambda said: None,
    ):
        self._policy, self._when, self._drawn_at = policy, when, drawn_at
        self._safely, self._problem = safely, problem
        self._reading: tuple[torch.Tensor, Pass] | None = None
        self._rows = 0
        self.passes: list[Pass] = []

    def attach(self, stack: contextlib.ExitStack) -> None:
        """Listen until the stack is closed."""
        stack.callback(self._policy.register_forward_pre_hook(self._note_ids, with_kwargs=True).remove)
        stack.callback(self._policy.register_forward_hook(self._note_scores, with_kwargs=True).remove)
        head = unwrap(self._policy).get_output_embeddings()
        if head is not None:
            stack.callback(head.register_forward_hook(self._note_logits, prepend=True).remove)

    def _note_ids(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # a tensor within a compiled graph takes no hook
            return
        self._reading = None
        ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
        if is_unseen() or not torch.is_grad_enabled() or not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return
        when = self._when()
        if when is not None:
            kept: Any = mask if getattr(mask, "shape", None) == ids.shape else torch.ones_like(ids)
            attended, rows = kept.bool().tolist(), list[Trained]()
            for row, own in zip(ids.tolist(), attended):
                read = tuple(token for token, attends in zip(row, own) if attends)
                rows.append(Trained(row=self._rows, ids=read, tokens=(), padded=tuple(row), **when))
                self._rows += 1
            self._reading = ids, Pass(rows, attended)

    def _begin(self, scores: Any) -> tuple[torch.Tensor, Pass] | None:
        """Return the ids and the pass that scores, or logits, are of, once; None where they are not to be read."""
        read = not torch.compiler.is_compiling() and not is_unseen() and isinstance(scores, torch.Tensor)
        if not read or not scores.requires_grad:
            return None
        reading, self._reading = self._reading, None
        return reading

    def _note_logits(self, head: Any, args: Any, logits: Any) -> None:
        if (reading := self._begin(logits)) is None:
            return
        if logits.ndim != 3 or len(logits) != len(reading[0]):
            self._problem("the logits of a forward pass are not a row for each sequence")
            return
        self.passes.append(reading[1])
        kept = logits.detach()
        logits.register_hook(lambda gradient: self._safely(self._read_gradient, *reading, kept, gradient))

    def _note_scores(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Listen to log-probabilities that the forward pass itself gives, by labels, where it makes no logits."""
        scores: Any = getattr(output, "log_probs", None)
        labels = kwargs.get("labels")
        if labels is None or (reading := self._begin(scores)) is None:
            return
        if scores.shape != labels[:, 1:].shape:
            self._problem("which token each log-probability of a forward pass belongs to is not known")
            return
        self.passes.append(reading[1])
        read = functools.partial(self._read_scores, reading[1], labels, scores.detach())
        scores.register_hook(functools.partial(self._safely, read))

    def _read_scores(self, made: Pass, labels: torch.Tensor, scores: torch.Tensor, gradient: torch.Tensor) -> None:
        """Each of a row's scores (rows, tokens - 1) is that of the next label."""
        rows, places = (gradient.abs() > LEAST * gradient.abs().max()).nonzero(as_tuple=True)
        told = rows, places, labels[rows, places + 1], gradient[rows, places], scores[rows, places]
        made.write(list(zip(*(each.tolist() for each in told))))

    def _read_gradient(self, ids: torch.Tensor, made: Pass, logits: torch.Tensor, gradient: torch.Tensor) -> None:
        """Read the tokens from logits and their gradient, (rows, kept, words)."""
        sizes, found = gradient.abs().amax(-1), list[tuple[int, int, int, float, float]]()  # (rows, kept)
        used, before = (sizes > LEAST * sizes.max()).nonzero(), ids.shape[1] - logits.shape[1]  # (tokens, 2)
        drawn = self._drawn_at()
        some = used[:: max(1, len(used) // _SAMPLE)].unbind(1)
        temperature = (scoring_temperature(logits[some], gradient[some]) if len(used) else None) or drawn
        for part in used.split(max(1, _ROOM // (4 * logits.shape[-1]))):
            rows, places = part.T
            own, given = gradient[rows, places].float(), logits[rows, places].float()  # (tokens, words)
            token = own.abs().argmax(-1, keepdim=True)
            after = (places + before + 1).clamp(max=ids.shape[1] - 1)
            follows = ids[rows, after][:, None].to(token)
            nearly = own.gather(-1, follows).abs() >= _NEARLY * own.gather(-1, token).abs()
            token = torch.where(nearly & (places + before + 1 < ids.shape[1])[:, None], follows, token)
            logps = (given / temperature).log_softmax(-1)
            rest = 1 - logps.gather(-1, token).exp()
            weight = (own.gather(-1, token) * temperature / rest).masked_fill(rest <= _SURE, math.nan)
            logp = logps if temperature == drawn else (given / drawn).log_softmax(-1)
            told = rows, places + before, *(each[:, 0] for each in (token, weight, logp.gather(-1, token)))
            found += zip(*(each.tolist() for each in told))
        made.write(found)
