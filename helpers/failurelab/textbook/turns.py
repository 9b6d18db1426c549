"""Completions of several turns: which of their tokens the policy drew, by the ids alone.

A later turn is drawn behind a prompt that begins with an earlier prompt and its completion. What stands between that
completion and the new tokens was given: by a tool, an environment, or the template of the chat. Given tokens are read,
and not trained on. So a token was drawn where a draw behind all ids before it has it. A turn that was rendered anew, or
a text that was encoded again, has tokens that nobody drew (F18).
"""

import dataclasses
from collections.abc import Collection, Sequence

import torch

from failurelab.textbook.rows import Ids, Row

MASK = "tokens that were not drawn"
RENDERED = "a turn rendered otherwise than it was drawn"


def covered(ids: Ids, drawn: Sequence[Row]) -> dict[int, tuple[Row, int]]:
    """Return the places of ids that a draw has, each with that draw and the place in its completion."""
    found: dict[int, tuple[Row, int]] = {}
    for draw in drawn:
        start = len(draw.prompt)
        if not begins(ids, draw.prompt):
            continue
        for place in range(count_same(ids[start:], draw.completion)):
            found.setdefault(start + place, (draw, place))
    return found


def with_draws(row: Row, drawn: Sequence[Row]) -> Row:
    """Return a row whose tokens that no draw has are given, with the log-probabilities of the engines that drew it."""
    start, known = len(row.prompt), covered(row.prompt + row.completion, drawn)
    given = frozenset(place for place in range(len(row.completion)) if place + start not in known)
    scores = torch.full((len(row.completion),), torch.nan)
    for place, (draw, at) in known.items():
        if place >= start and draw.engine_logps is not None and at < len(draw.engine_logps):
            scores[place - start] = draw.engine_logps[at]
    return dataclasses.replace(row, given=given, engine_logps=None if scores.isnan().all() else scores)


def goes_on(first: Row, completion: Ids) -> bool:
    """Whether a completion of several turns may begin with a draw, whose end a loop may take off, or is cut within."""
    size = min(len(completion), len(first.completion) - first.ended)
    return size > 0 and completion[:size] == first.completion[:size]


def pad_alike(rows: Sequence[Row]) -> list[Row]:
    """Return rows of a generation with the lengths of the longest, as trainers pad them where turns were joined."""
    if not any(row.given for row in rows):
        return list(rows)
    width, length = (max(len(own) for own in each) for each in zip(*((row.prompt, row.completion) for row in rows)))
    return [dataclasses.replace(row, padded=(max(width, row.padded[0]), length)) for row in rows]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A row that a rollout function returned, beside what was drawn."""

    row: Row  # with the tokens that are to be read alone as given
    foreign: int  # how many of its tokens are said to be the policy's, and nobody drew them
    moved: int  # how many of them were drawn in a later turn of this dialogue, behind other ids than stand before them
    masked: int  # how many of them were drawn, and are said to be given
    seen: bool  # whether it is known what drew it


def judge(
    row: Row, mask: Sequence[int], drawn: Sequence[Row], closing: Collection[int], astray: Sequence[Row] = ()
) -> Judged:
    """Hold a row that a rollout function returned, and its mask, against what was seen to be drawn.

    Args:
        row: with the completion that it returned.
        mask: 1 for a token of the policy's, 0 for one that was given; what it lacks counts as 1.
        drawn: by the trainer's model or engine, within the function.
        closing: ids of ends and of the padding, which may stand behind a completion that is over, and are nobody's.
        astray: those of what was drawn behind whose prompt no returned row goes on.
    """
    ids, length = row.prompt + row.completion, len(row.completion)
    true = with_draws(row, drawn)
    own = set(range(length)) - true.given
    told = {place for place in range(length) if place >= len(mask) or mask[place]}
    if not (own or any(begins(ids, draw.prompt) and draw.prompt for draw in drawn)):
        return Judged(dataclasses.replace(true, given=frozenset(range(length)) - told), 0, 0, 0, False)
    last = max(own, default=-1) + 1
    over = set(range(last, length)) if set(row.completion[last:]) <= set(closing) else set()
    foreign, masked = told - own - over, own - told
    moved = {place for draw in astray for place in _stands_in(row, draw) if place in foreign}
    # where a draw is left before its end, a text was encoded again: which tokens were given, the mask alone tells
    given = frozenset(range(length)) - (told | masked)
    given |= frozenset() if foreign & _broken(row, drawn) else foreign - moved
    return Judged(dataclasses.replace(true, given=given), len(foreign - moved), len(moved), len(masked), True)


def _broken(row: Row, drawn: Sequence[Row]) -> set[int]:
    """Return the places of a row where a draw goes on otherwise, and none is over, but for its end."""
    ids, start, left, over = row.prompt + row.completion, len(row.prompt), set[int](), set[int]()
    for draw in drawn:
        if begins(ids, draw.prompt):
            bare = draw.prompt + draw.completion[: len(draw.completion) - draw.ended]
            same = count_same(ids, bare)
            (over if same == len(bare) else left).add(same - start)
    return left - over


def _stands_in(row: Row, draw: Row) -> range:
    """Return where a later turn of a row's dialogue stands in it, though it was drawn behind other ids."""
    bare = draw.completion[: len(draw.completion) - draw.ended]
    if bare and begins(draw.prompt, row.prompt):
        for start in range(len(row.completion) - len(bare), -1, -1):
            if row.completion[start : start + len(bare)] == bare:
                return range(start, start + len(draw.completion))
    return range(0)


def begins(ids: Ids, start: Ids) -> bool:
    """Return whether ids begin with others; those with another last one are told without a copy."""
    length = len(start)
    return length <= len(ids) and (not start or ids[length - 1] == start[-1]) and ids[:length] == start


def count_same(ids: Ids, others: Ids) -> int:
    """Return with how many ids both begin."""
    differing = (at for at, (one, two) in enumerate(zip(ids, others)) if one != two)
    return next(differing, min(len(ids), len(others)))
