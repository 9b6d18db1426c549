"""Completions of several turns: which of their tokens the policy drew, by the ids alone.

A later turn is drawn behind a prompt that begins with an earlier prompt and its completion. What stands between that
completion and the new tokens was given: by a tool, an environment, or the template of the chat. Given tokens are read,
and not trained on. A loop of one's own that calls the model shows it too: a token before which the policy was never
asked for the next one was not drawn. Where the later prompt begins with the earlier one and goes on with other ids than
were drawn, the template or the tokenizer has rendered the turn anew (F18).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from failurelab.textbook.rows import Ids, Row

RENDERED = "a turn rendered otherwise than it was drawn"
MASK = "the environment's mask"
Decode = Callable[[Ids], str]
SHOWN = 4  # ids of a line
_MOST = 1 << 22  # ids of all contexts that are kept, 32 MiB


def join(known: Sequence[Row], drawn: Sequence[Row]) -> list[Row]:
    """Return the rows with what was drawn since: a later turn makes its row longer, all else is a row of its own."""
    rows, used = list(known), set[int]()
    for later in drawn:
        place = _earlier(rows[: len(known)], later, used)
        if place is None:
            rows.append(later)
        else:
            used.add(place)
            rows[place] = _longer(rows[place], later)
    return rows


def _earlier(rows: Sequence[Row], later: Row, used: set[int]) -> int | None:
    """Return the place of the row that a later turn goes on: that with the most tokens of those that it begins with."""
    begun = {place: _begun(row, later) for place, row in enumerate(rows) if place not in used}
    found = [place for place, length in begun.items() if length]
    return max(found, key=lambda place: len(rows[place].prompt) + begun[place], default=None)  # of several, the first


def _begun(row: Row, later: Row) -> int:
    """Return how many tokens of a row's completion a later prompt begins with, behind its prompt; 0: it does not.

    All of them, or all but the last, where that is an end: a loop may take it off before the next turn.
    """
    start = len(row.prompt)
    for length in range(len(row.completion), len(row.completion) - 1 - row.ended, -1):
        own = start + length
        if not length or own >= len(later.prompt) or later.prompt[own - 1] != row.completion[length - 1]:
            continue  # without a look at the rest, which takes longer
        if later.prompt[:own] == row.prompt + row.completion[:length]:
            return length
    return 0


def _longer(row: Row, later: Row) -> Row:
    start, end = _begun(row, later), len(later.prompt) - len(row.prompt)
    scores = None
    if row.engine_logps is not None and later.engine_logps is not None:
        between = row.engine_logps.new_full((end - start,), torch.nan)
        scores = torch.cat([row.engine_logps[:start], between, later.engine_logps])
    return dataclasses.replace(
        later,
        prompt=row.prompt,
        completion=later.prompt[len(row.prompt) :] + later.completion,
        given=row.given | frozenset(range(start, end)),
        padded=row.padded,
        inputs=row.inputs,
        engine_logps=scores,
    )


def pad_alike(rows: Sequence[Row]) -> list[Row]:
    """Return rows of a generation with the lengths of the longest, as trainers pad them where turns were joined."""
    if not any(row.given for row in rows):
        return list(rows)
    width, length = (max(len(own) for own in each) for each in zip(*((row.prompt, row.completion) for row in rows)))
    return [dataclasses.replace(row, padded=(max(width, row.padded[0]), length)) for row in rows]


def rendered_anew(rows: Sequence[Row], decode: Decode) -> str:
    """Return of how many turns the next one's prompt has other ids than were drawn, and an example; "" if of none."""
    lines = []
    for later in rows:
        for row in rows:
            start = len(row.prompt)
            if row is later or not 0 < start < len(later.prompt) or later.prompt[:start] != row.prompt:
                continue
            if row.completion and not _begun(row, later):
                lines.append(_differ(row.completion, later.prompt[start:], decode))
                break
    if not lines:
        return ""
    return f"the next turn's prompt has other ids than were drawn before, of {len(lines)} completions: {lines[0]}"


def encoded_again(row: Row, drawn: Sequence[Row], decode: Decode) -> str:
    """Return where a completion has the text of one that was drawn behind the same prompt, and other ids; else ""."""
    text = decode(row.completion)
    for other in drawn:
        if other.prompt == row.prompt and other.completion != row.completion and decode(other.completion) == text:
            return f"a completion has other ids than were drawn: {_differ(other.completion, row.completion, decode)}"
    return ""


def _differ(drawn: Ids, given: Ids, decode: Decode) -> str:
    place = next((at for at, (one, two) in enumerate(zip(drawn, given)) if one != two), min(len(drawn), len(given)))
    own, other = (list(ids[place : place + SHOWN]) for ids in (drawn, given))
    texts = f"{decode(tuple(own))!r} and {decode(tuple(other))!r}"
    return f"from token {place} on {own} were drawn, and {other} stand there ({texts})"


def match(row: Row, drawn: Sequence[Row], pad: int) -> Row | None:
    """Return the one of those that were drawn that a row is, or is the beginning of; None if it is not known.

    Where nothing was drawn behind its prompt, the same ids are the same row, wherever a function ends its prompt.
    Padding behind the end of what was drawn, which the function has left there, is not looked at.
    """
    ids = row.prompt + row.completion
    for other in [other for other in drawn if other.prompt == row.prompt] or drawn:
        own = other.prompt + other.completion
        padded = other.ended and ids[: len(own)] == own and set(ids[len(own) :]) <= {pad}
        if (padded or own[: len(ids)] == ids) and (row.completion or other.prompt == row.prompt):
            return other
    return None


def seen_behind(drawn: Row, start: int) -> Row:
    """Return what was drawn as a row whose prompt has `start` tokens: what `generate` was given behind it is given."""
    ids, more = drawn.prompt + drawn.completion, len(drawn.prompt) - start
    given = frozenset(range(more)) | {place + more for place in drawn.given if place + more >= 0}
    scores = drawn.engine_logps
    if scores is not None:
        scores = torch.cat([scores.new_full((max(more, 0),), torch.nan), scores[max(-more, 0) :]])
    return dataclasses.replace(drawn, prompt=ids[:start], completion=ids[start:], given=given, engine_logps=scores)


def wrong_mask(row: Row, mask: Sequence[int], true: Row | None) -> str:
    """Return what is wrong with the mask that a rollout function returned for a row; "" if nothing is known to be.

    Args:
        row: with the completion that it returned.
        mask: 1 for a token of the policy's, 0 for one that was given; what it lacks counts as 1.
        true: what was drawn, where that was seen.
    """
    length = len(row.completion)
    if len(mask) != length:
        kind = "shorter" if len(mask) < length else "longer"
        return f"is {kind} than its completion: {len(mask)} for {length} tokens"
    if true is None:
        return ""
    right = [int(place not in true.given) for place in range(length)]
    told = [int(bool(own)) for own in mask]
    if told == right:
        return ""
    away = [place for place in range(length) if told[place] != right[place]]
    trained = sum(told[place] for place in away)
    counts = f"{trained} tokens that were given are marked as the policy's, {len(away) - trained} of its own are not"
    if all(told):
        return f"marks no token as given: {counts}"
    if told[1:] == right[:-1]:
        return f"is shifted by one to the right: {counts}"
    if told[:-1] == right[1:]:
        return f"is shifted by one to the left: {counts}"
    return f"is the opposite of what was drawn: {counts}" if len(away) == length else f"is wrong: {counts}"


class AskedContexts:
    """The ids behind which a model was asked for the next token, by its own calls, with a cache or without.

    Attributes:
        contexts: without padding on their left; None where a call's ids are not known, or where they are too many.
    """

    def __init__(self, pad: int):
        self.contexts: set[Ids] | None = set()
        self._pad, self._last, self._width, self._left = pad, list[Ids](), 0, _MOST

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the arguments of one call of the model."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self.contexts is None or not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            self.contexts = None
            return
        cached = self._cached_tokens([*args, *kwargs.values()])
        self._left -= len(ids) * (cached + ids.shape[1])
        if self._left < 0 or (cached and (cached != self._width or len(ids) != len(self._last))):
            self.contexts = None
            return
        kept: Any = kwargs.get("attention_mask")
        kept = ids.new_ones(ids.shape) if cached or getattr(kept, "shape", None) != ids.shape else kept
        new = [tuple(row[own.bool()].tolist()) for row, own in zip(ids, kept)]
        new = [before + row for before, row in zip(self._last, new)] if cached else new
        self._last, self._width = new, cached + ids.shape[1]
        self.contexts |= {row[next((at for at, token in enumerate(row) if token != self._pad), 0) :] for row in new}

    def _cached_tokens(self, values: Sequence[Any]) -> int:
        """Return how many tokens the cache among a call's arguments holds, which each release calls by another name."""
        for value in values:
            if hasattr(value, "get_seq_length"):
                return int(value.get_seq_length())
            if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # before caches were of a class
                return self._width
        return 0


def drawn_by_hand(rows: Sequence[Row], contexts: set[Ids] | None, closing: Collection[int]) -> list[Row | None]:
    """Return the rows with the places where no token was drawn, for there the policy was asked for none.

    None stands for a row of which that is not known: nothing is asked within it, or other texts were asked about, whose
    tokens may stand here. Where the policy was asked, the token may be given all the same: a cache can be filled token
    by token. Ends and padding behind the last token that was drawn are nobody's.

    Args:
        rows: that a rollout function returned.
        contexts: see `AskedContexts`.
        closing: ids of ends and of the padding, which a loop may put behind a completion that is over.
    """
    if not contexts:
        return [None] * len(rows)
    whole = [row.prompt + row.completion for row in rows]
    over = [_without_closing(ids, closing) for ids in whole]
    for context in contexts:
        bare = _without_closing(context, closing)
        inside = any(_begins(ids, context) or _begins(ids, bare) for ids in whole)
        if not inside and not any(_begins(context, ids) for ids in over):
            return [None] * len(rows)
    judged: list[Row | None] = []
    for row, ids in zip(rows, whole):
        start, last = len(row.prompt), len(_without_closing(ids, closing))
        given = {place for place in range(len(row.completion)) if ids[: start + place] not in contexts}
        given -= set(range(max(last - start, 0), len(row.completion)))
        own = len(given) < min(len(row.completion), max(last - start, 1))
        judged.append(dataclasses.replace(row, given=frozenset(given)) if own else None)
    return judged


def _begins(ids: Ids, start: Ids) -> bool:
    """Return whether ids begin with others; those with another last one are told without a copy."""
    length = len(start)
    return length <= len(ids) and (not start or ids[length - 1] == start[-1]) and ids[:length] == start


def told_certain(
    row: Row, logps: Sequence[float | None], mask: Sequence[int], likeliest: Sequence[int], closing: Collection[int]
) -> frozenset[int]:
    """Return the places of a row whose tokens no one can have drawn: they are said to have had a probability of 1.

    A loop that returns log-probabilities has none for the tokens of an environment, and mostly puts zeros there.
    Counted are two and more in a row, of which at least a half are not even the policy's likeliest ones.

    Args:
        row: that a rollout function returned.
        logps: that it returned for the row's completion. Where all are zeros they tell nothing.
        mask: as for `wrong_mask`; what is masked is let be.
        likeliest: the policy's likeliest token at each place.
        closing: ids of ends and of the padding; those at the end are let be.
    """
    length = min(len(_without_closing(row.completion, closing)), len(logps), len(mask), len(likeliest))
    found, run = set[int](), list[int]()
    if len(logps) != len(row.completion) or not any(logps):
        return frozenset()
    for place in range(length + 1):
        if place < length and logps[place] == 0 and mask[place]:
            run.append(place)
            continue
        if len(run) > 1 and 2 * sum(row.completion[own] != likeliest[own] for own in run) >= len(run):
            found |= set(run)
        run = []
    return frozenset(found)


def _without_closing(ids: Ids, closing: Collection[int]) -> Ids:
    length = len(ids)
    while length and ids[length - 1] in closing:
        length -= 1
    return ids[:length]
