"""F18 in a script's own rollouts: tokens that are scored behind other ids than they were drawn behind.

A rollout function of several turns that joins all prompts, and then all completions, gives the loss the tokens that
were drawn, in a context that the policy never saw: their log-probabilities are those of other texts. The ids of each
draw of the policy are looked for in what the rollout function returns: behind their own context, or elsewhere.

Upstream: TRL #4543.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from failurelab._text import first_line
from failurelab._unwrap import input_device
from failurelab.errors import raises_own
from failurelab.handles import keep_random_state
from failurelab.preflight.answer import Finding, Quantity
from failurelab.preflight.judges.rows import tokenizer_of
from failurelab.textbook.rows import Ids
from failurelab.textbook.scores import plain

_SCORED = 8  # tokens of so many draws are scored in both contexts
_CHANCE = 8  # tokens that stand by chance where they were not drawn are fewer
_SAME = 0.01  # nats a token: a context that makes no more of a difference is not judged
_SHOWN = 24  # characters of each text that is shown


@dataclasses.dataclass(frozen=True)
class Draw:
    """Tokens that the policy drew, up to their end and with it, and the ids that it was given, without padding."""

    context: Ids
    tokens: Ids


@dataclasses.dataclass(frozen=True)
class Returned:
    """A row that a rollout function returned: its prompt without padding, its completion, and which tokens count."""

    prompt: Ids
    completion: Ids
    own: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Misplaced:
    """A draw whose tokens stand behind other ids than its context."""

    draw: Draw
    behind: Ids


def find_misplaced(
    draws: Sequence[Draw], rows: Sequence[Returned], ends: Collection[int]
) -> tuple[list[Misplaced], int, int]:
    """Return the draws that stand in a returned completion, and in none behind their own context.

    Tokens of a row that a draw explains in its own context are no other's. What is left has to be draws from its
    beginning to its end, or a draw that is long: a few tokens stand anywhere by chance. Returned too are how many rows
    such draws explain, and how many there are that no draw explains in its own context.
    """
    right = [[_stands(draw, row) for draw in draws] for row in rows]
    kept = [[_is_kept(draw, row, count, ends) for draw, count in zip(draws, own)] for row, own in zip(rows, right)]
    astray = [place for place in range(len(draws)) if not any(own[place] for own in kept)]
    found, left, explained, used = dict[int, Misplaced](), 0, 0, set[int]()
    for row, own in zip(rows, right):
        free = list(row.own)
        for draw, count in zip(draws, own):
            start = len(draw.context) - len(row.prompt)
            free[start : start + count] = [False] * count
        if not any(is_free and token not in ends for is_free, token in zip(free, row.completion)):
            continue
        left += 1
        fresh = [place for place in astray if place not in used]
        inside, whole = _explain(row, free, draws, [*fresh, *(set(range(len(draws))) - set(astray))], ends)
        inside = {place: start for place, start in inside.items() if place in fresh}
        if inside and (whole or any(len(draws[place].tokens) > _CHANCE for place in inside)):
            explained += 1
            used |= set(inside)
            full = row.prompt + row.completion
            found |= {
                place: Misplaced(draws[place], full[: len(row.prompt) + start]) for place, start in inside.items()
            }
    return list(found.values()), explained, left


def _stands(draw: Draw, row: Returned) -> int:
    """Return how many tokens of a draw stand in a row's completion behind the draw's own context."""
    width, full = len(draw.context), row.prompt + row.completion
    if not len(row.prompt) <= width < len(full) or full[:width] != draw.context:
        return 0
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draw.tokens, full[width:]))))


def _is_kept(draw: Draw, row: Returned, count: int, ends: Collection[int]) -> bool:
    """Return whether a draw stands in a row in its own context, whole or without its end, or as far as the row goes.

    Args:
        draw: of the policy.
        row: that was returned.
        count: as `_stands` gives it.
        ends: tokens that end a completion.
    """
    whole = count >= len(draw.tokens) - (draw.tokens[-1] in ends)
    return count > 0 and (whole or len(draw.context) + count == len(row.prompt) + len(row.completion))


def _explain(
    row: Returned, free: Sequence[bool], draws: Sequence[Draw], numbers: Sequence[int], ends: Collection[int]
) -> tuple[dict[int, int], bool]:
    """Return which draws stand in the free tokens of a row, with their places, and whether these are all of them."""
    inside, whole, place = dict[int, int](), True, 0
    while place < len(free):
        if not free[place]:
            place += 1
            continue
        best, length = None, 0
        for number in numbers:  # of equally long ones the first
            tokens = draws[number].tokens
            bare = tokens[:-1] if tokens[-1] in ends else tokens
            for some in (tokens, bare):
                stop = place + len(some)
                if number not in inside and len(some) > length and row.completion[place:stop] == some:
                    best, length = (number, len(some)) if all(free[place:stop]) else (best, length)
        if best is not None:
            inside[best] = place
        else:
            whole = whole and row.completion[place] in ends
        place += max(length, 1)
    return inside, whole


class ContextNotes:
    """Notes of each rollout which draws of the policy stand in what was returned behind another context.

    Args:
        trainer: whose rollout function is looked at.
        maker: its name.
    """

    def __init__(self, trainer: Any, maker: str):
        self._trainer, self._maker = trainer, maker
        self._draws = self._explained = self._left = 0
        self._misplaced, self._apart, self._error = list[Misplaced](), list[float](), ""

    def note(self, *given: Any) -> None:
        """Take what the policy drew in a rollout, and what came of it; an error of this check's own ends no run."""
        try:
            self._note(*given)
        except Exception as error:
            if raises_own(error):
                raise
            self._error = f"{type(error).__name__}: {first_line(error)}"

    def _note(self, draws: Sequence[Draw], output: dict[str, Any], ends: set[int], pad: int) -> None:
        prompts, completions = output.get("prompt_ids") or (), output.get("completion_ids") or ()
        masks = output.get("env_mask") or [None] * len(completions)
        rows = []
        for prompt, completion, mask in zip(prompts, completions, masks):
            ids = tuple(int(token) for token in completion)
            own = [bool(counts) for counts in mask][: len(ids)] if mask is not None else []
            rows.append(Returned(without_padding(prompt, pad), ids, (*own, *[True] * (len(ids) - len(own)))))
        found, explained, left = find_misplaced([draw for draw in draws if draw.tokens], rows, ends | {pad})
        for misplaced in found[: _SCORED - len(self._apart)]:
            self._apart.append(self._difference(misplaced))
        self._explained += explained
        self._left += left
        self._draws += len(draws)
        self._misplaced += found

    def _difference(self, misplaced: Misplaced) -> float:
        """Return how far the tokens' log-probabilities in both contexts are apart: the mean, in nats a token."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        scores, tokens = [], misplaced.draw.tokens
        with plain(model), keep_random_state(), torch.no_grad():
            for context in (misplaced.draw.context, misplaced.behind):
                ids = torch.tensor([context + tokens], device=input_device(model))
                logps = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float().log_softmax(-1)
                places = range(len(context) - 1, len(context) - 1 + len(tokens))
                scores.append(torch.stack([logps[at, token] for at, token in zip(places, tokens)]))
        return float((scores[0] - scores[1]).abs().mean())

    def answers(self) -> Iterator[Finding]:
        """Yield what was seen."""
        if self._error:
            yield Finding.not_checked("F18", self._error, part=self._maker, fault="context")
        if not self._apart or 2 * self._explained < self._left:  # else something that was not seen has drawn them
            return
        decode, first = tokenizer_of(self._trainer).decode, self._misplaced[0]
        drawn, own, other = (
            repr(decode(list(ids))[-_SHOWN:]) for ids in (first.draw.tokens, first.draw.context, first.behind)
        )
        count, apart = len(self._misplaced), sum(self._apart) / len(self._apart)
        said = (
            f"{count} of {self._draws} completions that the policy drew in {self._maker} stand in what it returned "
            f"behind other ids than they were drawn behind, such as {drawn}: drawn behind {own}, scored behind {other}"
        )
        figures = (
            Quantity("difference of a log-probability", apart, "nats a token"),
            Quantity("completions in another context", count, "", self._draws),
        )
        more: dict[str, Any] = {"part": self._maker, "fault": "context"}
        if apart < _SAME:
            why = f"{said}; to this model that makes no difference ({apart:.1e} nats a token)"
            yield Finding.not_checked("F18", why, **more)
            return
        yield Finding(
            "F18",
            f"{said}. There the policy's log-probability of a token is {apart:.2g} nats away from that at which it "
            "was drawn, on average",
            f"Return from {self._maker} each completion behind the ids that it was drawn behind: of several turns the "
            "first prompt, then the completion, the next turn's prompt (env_mask 0) and its completion, each drawn "
            "behind all that stands before it; or a row of its own for each turn.",
            figures=figures,
            **more,
        )


def without_padding(ids: Sequence[int], pad: int) -> Ids:
    """Return ids without the padding on their left."""
    return tuple(itertools.dropwhile(lambda token: token == pad, map(int, ids)))
