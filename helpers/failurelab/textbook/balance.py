"""What the ledger's three tables say, as figures, and the same figures with each mistake planted in the tables.

A figure that these tables cannot tell is None. What the figures mean is the registry's: see `failures.verdicts`.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from failurelab import failures
from failurelab.failures import verdicts
from failurelab.failures.predicates import Value
from failurelab.textbook.reading import Token, Trained
from failurelab.textbook.rows import Ids, strip_padding
from failurelab.textbook.turns import begins, count_same

Figures = dict[str, Value]
POLICY = "the policy"
DRAWN, MOVED, PADDING, FOREIGN, UNKNOWN = "drawn", "moved", "padding", "foreign", "not known"
_LONG = 8  # tokens that stand by chance where they were not drawn are fewer
_CLEAR = 0.5  # deviations of its group from which on a reward says whether a completion is to be made likelier
_LEAST_MOVE = 1e-4  # nats a token: a policy that moved less looks like its first weights


@dataclasses.dataclass(frozen=True)
class Draw:
    """A completion that was drawn."""

    number: int
    call: int  # number of the call that drew it
    row: int  # place in that call
    context: Ids  # ids that it was drawn behind, without padding
    tokens: Ids  # that were drawn, up to the end and with it
    ended: bool  # whether the last of them is an end
    step: int = 0  # optimizer steps that were done before
    by: str = POLICY  # `the policy`, `an engine`, or the class of another model
    weights: int | None = None  # a number for the weights that drew; None where they are not known
    temperature: float | None = None  # that was asked for; None where it is not known
    logps: tuple[float, ...] | None = None  # of the tokens, by what drew them; None where it did not tell
    policy_logps: tuple[float, ...] = ()  # of the tokens, by the policy at that time

    @functools.cached_property
    def sequence(self) -> Ids:
        """The ids that it was drawn behind, and its tokens."""
        return self.context + self.tokens

    def policy_logp(self, place: int) -> float:
        """Return the log-probability that the policy gave the token at a place of the sequence."""
        return self.policy_logps[place - len(self.context)]


@dataclasses.dataclass(frozen=True)
class Paid:
    """A completion that was rewarded."""

    row: int  # place in the call of the reward functions
    batch: int  # which call that is
    step: int  # optimizer steps that were done before
    group: int  # number of the group in that batch
    rewards: tuple[float | None, ...]  # of each function
    total: float | None  # of the trainer; None where no function gave one
    text: str | None = None  # that the functions were given; None where it is no plain text
    other_text: bool | None = None  # whether it is another one than was drawn; None where that is not known
    # all that they were given for this row, as text
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # of the completion, as the functions were given them, or as they were drawn; None where not known
    ids: Ids | None = None
    draw: Draw | None = None  # that it is; None where that is not known


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What has to be known of a run to read its tables."""

    pad: int = 0  # id of the padding
    ends: frozenset[int] = frozenset()  # ids that end a completion
    draws_known: bool = True  # whether nothing can have drawn without being seen: no rollouts of the script's own
    # whether such rollouts asked the policy for tokens by their own calls, which no draw is known of
    by_hand: bool = False
    groups_known: bool = True  # whether groups are those of the library: completions that stand together
    rewards_known: bool = True  # whether a completion's reward is the sum of the functions' rewards
    steps_allowed: int = 0  # optimizer steps that may lie between a draw and the step that trains on it
    rounding: float = 0.01  # of a log-probability, in nats
    noisy: bool = False  # whether dropout makes each pass another one
    # nats a token that the policy has moved since a call in which another one drew, until the next, by that call
    moves: Mapping[int, float] = dataclasses.field(default_factory=dict)
    rows: tuple[Mapping[str, Any], ...] = ()  # of the dataset, where it is small
    decode: Callable[[Ids], str] = str  # gives the text of ids
    # of the policy as it trained, by the number of steps done
    weights: Mapping[int, int | None] = dataclasses.field(default_factory=dict)


Plant = Callable[["Tables"], "Tables"]
State = tuple[str, Draw | None]  # of a token that is trained on, and its draw


@dataclasses.dataclass(frozen=True)
class Tables:
    """The three tables, linked: a trained token with its draw, a paid row with its draw."""

    draws: tuple[Draw, ...]
    trained: tuple[Trained, ...]
    paid: tuple[Paid, ...]
    setting: Conditions = Conditions()

    @functools.cached_property
    def states(self) -> list[list[State]]:
        """Of each token that is trained on, row by row, what it is, and its draw."""
        setting, every = self.setting, [self._covered(row) for row in self.trained]
        used = {draw.number for own in every for _, draw in own if draw is not None}
        astray = [draw for draw in self.draws if draw.tokens and draw.number not in used]
        left = {
            place: self._elsewhere(row, own, astray)
            for place, (row, own) in enumerate(zip(self.trained, every))
            if not _is_known(own)
        }
        explained = sum(map(_is_known, left.values()))
        for place, found in left.items():
            row, own = self.trained[place], every[place]
            seen = any(draw is not None for _, draw in own) or any(begins(row.ids, each.context) for each in self.draws)
            if _is_known(found) and (setting.draws_known or 2 * explained >= len(left)):
                every[place] = found
            elif self.draws and not setting.by_hand and (setting.draws_known or seen):
                every[place] = _name_unknown(own, FOREIGN)
        return every

    def _covered(self, row: Trained) -> list[State]:
        """Return the tokens that were drawn behind what the model read before them."""
        draws = [draw for draw in self.draws if draw.tokens and begins(row.ids[:-1], draw.context)]
        spans = sorted(((count_same(row.ids, draw.sequence), draw) for draw in draws), key=lambda span: -span[0])
        whole = [same for same, draw in spans if draw.ended and same == len(draw.sequence)]
        pad, states = self.setting.pad, list[State]()
        for token in row.tokens:
            place, scored = token.place, (token.token,)
            fits = (draw for same, draw in spans if place <= same and draw.sequence[place : place + 1] == scored)
            own = next((draw for draw in fits if place >= len(draw.context)), None)
            over = whole and place >= whole[0] and {token.token, *row.ids[place:]} == {pad}
            states.append((DRAWN, own) if own is not None else (PADDING, None) if over else (UNKNOWN, None))
        return states

    def _elsewhere(self, row: Trained, states: list[State], astray: list[Draw]) -> list[State]:
        """Return the states with those tokens that belong to a draw behind other ids, which stands here as a whole."""
        if row.offset:
            return _name_unknown(states, MOVED)
        found, long = list(states), False
        for draw in sorted(astray, key=lambda draw: -len(draw.tokens)):
            bare = draw.tokens[: len(draw.tokens) - draw.ended] or draw.tokens
            for start in range(len(row.ids) - len(bare) + 1):
                if row.ids[start : start + len(bare)] != bare:
                    continue
                span = range(start, start + len(draw.tokens))
                inside = [at for at, token in enumerate(row.tokens) if token.place in span and found[at][0] == UNKNOWN]
                for at in inside:
                    found[at] = (MOVED, draw)
                if inside:
                    long |= len(bare) > _LONG
                    break
        rest = {token.token for token, (state, _) in zip(row.tokens, found) if state == UNKNOWN}
        is_moved = any(state == MOVED for state, _ in found)
        whole = is_moved and (long or rest <= self.setting.ends | {self.setting.pad})
        return _name_unknown(found, MOVED) if whole else states

    @functools.cached_property
    def groups(self) -> dict[tuple[int, int], list[Paid]]:
        """The rows that were paid, by the number of their batch and of their group in it."""
        groups: dict[tuple[int, int], list[Paid]] = {}
        for paid in self.paid:
            groups.setdefault((paid.batch, paid.group), []).append(paid)
        return groups

    @functools.cached_property
    def of_row(self) -> dict[int, Paid]:
        """The paid row of each row that is trained on, by its place in `trained`; what is not known is left out.

        Rows of the same tokens that were paid otherwise cannot be told apart.
        """
        known: dict[Ids, list[Paid]] = {}
        for paid in self.paid:
            if paid.draw is not None:
                known.setdefault(strip_padding(paid.draw.sequence, self.setting.pad)[1], []).append(paid)
        links = {}
        for place, row in enumerate(self.trained):
            some = known.get(strip_padding(row.ids, self.setting.pad)[1], [])
            if len({(paid.total, paid.group) for paid in some}) == 1:
                links[place] = some[-1]
        return links

    # as tables

    def lines_of_draws(self) -> Iterator[dict[str, Any]]:
        """Yield a line for each token that was drawn."""
        for draw in self.draws:
            told = {name: getattr(draw, name) for name in ("call", "row", "by", "weights", "temperature")}
            for place, token in enumerate(draw.tokens):
                logp, context = draw.logps and draw.logps[place], draw.context + draw.tokens[:place]
                yield {"draw": draw.number, **told, "place": place, "token": token, "context": context, "logp": logp}

    def lines_of_trained(self) -> Iterator[dict[str, Any]]:
        """Yield a line for each token that is trained on."""
        for row, states in zip(self.trained, self.states):
            for token, (state, draw) in zip(row.tokens, states):
                yield {
                    "rank": row.rank, "step": row.step, "row": row.row, "place": token.place, "token": token.token,
                    "context": row.ids[: token.place], "logp_now": token.logp,
                    "logp_old": draw.policy_logp(token.place) if draw and state == DRAWN else None,
                    "weight": None if math.isnan(token.weight) else token.weight, "state": state,
                    "draw": draw and draw.number,
                }  # fmt: skip

    def lines_of_paid(self) -> Iterator[dict[str, Any]]:
        """Yield a line for each completion that was rewarded."""
        for paid in self.paid:
            told = {name: getattr(paid, name) for name in ("batch", "row", "group", "rewards", "total", "text")}
            yield {**told, "draw": paid.draw and paid.draw.number}


def _is_known(states: Sequence[State]) -> bool:
    return all(state != UNKNOWN for state, _ in states)


def _name_unknown(states: Sequence[State], name: str) -> list[State]:
    return [(name, None) if state == UNKNOWN else (state, draw) for state, draw in states]


def measure(tables: Tables) -> Figures:
    """Return the figures of the tables, by the names of docs/figures.md; None where one is not known."""
    return {
        **_of_tokens(tables),
        **_of_scores(tables),
        **_of_policy(tables),
        **_of_groups(tables),
        **_of_rows(tables),
        **_of_ends(tables),
    }


def _of_tokens(tables: Tables) -> Figures:
    counts = Counter(state for own in tables.states for state, _ in own)
    known = counts.total() > 0 and bool(tables.draws)

    def count(state: str) -> int | None:
        """A count of 0 is known where each token is."""
        return counts[state] if known and (counts[state] or not counts[UNKNOWN]) else None

    return {
        "tokens_trained": counts.total(),
        "foreign_tokens": count(FOREIGN),
        "moved_tokens": count(MOVED),
        "padding_trained": count(PADDING),
    }


def _of_scores(tables: Tables) -> Figures:
    gaps, apart, shifts = list[float](), list[float](), Counter[int]()
    for row, states in zip(tables.trained, tables.states):
        if row.offset is not None:
            shifts[row.offset] += len(row.tokens)
        for token, (state, draw) in zip(row.tokens, states):
            if draw is None or tables.setting.noisy:
                continue
            if state == MOVED:
                if token.token in draw.tokens:
                    apart.append(abs(token.logp - draw.policy_logps[draw.tokens.index(token.token)]))
            elif draw.weights is not None and draw.weights == row.weights and draw.policy_logps:
                gaps.append(abs(token.logp - draw.policy_logp(token.place)))
    wrong = [shift for shift, _ in shifts.most_common() if shift]
    return {
        "positions_off": None if not shifts else wrong[0] if wrong else 0,
        "trained_gap": max(gaps, default=None),
        "context_gap": sum(apart) / len(apart) if apart else None,
        "draw_rounding": tables.setting.rounding,
    }


def _gap(draws: Sequence[Draw]) -> float | None:
    """Return the mean difference of log-probabilities of the policy's from those of what drew; None if not known."""
    pairs = [pair for draw in draws if draw.logps for pair in zip(draw.logps, draw.policy_logps)]
    apart = [abs(one - other) for one, other in pairs if not math.isnan(one)]
    return sum(apart) / len(apart) if apart else None


def _of_policy(tables: Tables) -> Figures:
    setting = tables.setting
    links = [(row, draw) for row, own in zip(tables.trained, tables.states) for _, draw in own if draw is not None]
    draws = list({draw.number: draw for _, draw in links}.values())
    others = [draw for draw in draws if draw.by != POLICY]
    moved = gap = grown = None
    if draws and not others:
        gap = grown = 0.0
    elif others:
        calls = sorted({draw.call for draw in others})
        moves, earlier = dict[int, float](), 0.0
        for before, call in itertools.pairwise(calls):  # at a rate that begins at 0 nothing is behind yet
            earlier = max(earlier, setting.moves.get(before, 0.0))
            moves[call] = min(earlier, setting.moves.get(call, 0.0))
        call, moved = max(moves.items(), key=lambda item: item[1], default=(calls[-1], 0.0))
        first, gap = (_gap([draw for draw in others if draw.call == at]) for at in (calls[0], call))
        if first is not None and gap is not None and moved > max(_LEAST_MOVE, first):
            grown = max(0.0, gap - first) / moved
    other = 0
    for _, draw in links:
        then = setting.weights.get(draw.step)
        other += draw.by == POLICY and None not in (draw.weights, then) and draw.weights != then
    several = len({row.step for row in tables.trained}) > 1
    oldest = max((row.step - draw.step for row, draw in links), default=0)
    return {
        "drawn_by_others": len(others) == len(draws) if draws else None,
        "policy_gap": gap,
        "policy_moved": moved,
        "policy_gap_grown": grown,
        "other_weights": other if links else None,
        "draws_overdue": max(0, oldest - setting.steps_allowed) if links and several else None,
    }


def _of_groups(tables: Tables) -> Figures:
    groups = list(tables.groups.values()) if tables.setting.groups_known else []
    prompts = [[paid.columns.get("prompts") or (paid.draw and paid.draw.context) for paid in own] for own in groups]
    every = {prompt for own in prompts for prompt in own}
    mixed = sum(len(set(own)) > 1 for own in prompts) if None not in every and len(every) > 1 else None
    totals = [[paid.total for paid in own if paid.total is not None] for own in groups]
    flat = sum(bool(own) and max(own) - min(own) <= 1e-6 * max(map(abs, (1.0, *own))) for own in totals)
    known = groups and tables.setting.rewards_known
    return {"groups": len(groups) or None, "groups_mixed": mixed, "flat_groups": flat if known else None}


def _of_rows(tables: Tables) -> Figures:
    """Whether each row is trained on by its own reward: pushed up where it is the better one of its group."""
    compared, turned = 0, 0
    for place, paid in tables.of_row.items():
        own = [each.total for each in tables.groups[paid.batch, paid.group] if each.total is not None]
        if paid.total is None or len(own) < 2:
            continue
        mean = sum(own) / len(own)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in own) / len(own))
        weight = sum(token.weight for token in tables.trained[place].tokens if not math.isnan(token.weight))
        if deviation <= 1e-6 or abs(paid.total - mean) < _CLEAR * deviation or not weight:
            continue
        compared += 1
        turned += weight * (paid.total - mean) > 0  # a loss that falls makes what has a negative derivative likelier
    known = tables.setting.groups_known and tables.setting.rewards_known and compared > 1
    other = [paid.other_text for paid in tables.paid if paid.other_text is not None]
    return {
        "rows_compared": compared,
        "rows_turned": turned if known else None,
        "other_texts": any(other) if other else None,
        "columns_moved": count_moved_columns(tables),
    }


def count_moved_columns(tables: Tables) -> int | None:
    """Return how many completions were rewarded with a column of another prompt's row; None where it is not known."""
    rows, decode = tables.setting.rows, tables.setting.decode
    known = [(paid.draw.context, paid) for paid in tables.paid if paid.draw is not None]
    if not rows or not known or len(known) < len(tables.paid):
        return None
    own = {context: _rows_of(decode(context), rows) for context in {context for context, _ in known}}
    if sum(bool(found) for found in own.values()) < 2:
        return None
    wrong = set()
    for name in rows[0]:
        asked = "prompts" if name == "prompt" else name
        values = {context: {repr(row[name]) for row in found} for context, found in own.items()}
        every = set().union(*values.values())
        for place, (context, paid) in enumerate(known):
            value = paid.columns.get(asked)
            if value is not None and values[context] and value in every - values[context]:
                wrong.add(place)
    return len(wrong)


def _rows_of(text: str, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows whose prompt a text holds; those with the longest one, for "1+1=" stands in "11+1=" too."""
    text = "".join(text.split())
    held = [(len(words), row) for row in rows if (words := _words(row["prompt"])) and words in text]
    longest = max((size for size, _ in held), default=0)
    return [row for size, row in held if size == longest]


def _words(prompt: Any) -> str:
    """Return a prompt's text, or that of its last message, without blanks."""
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return "".join(prompt.split()) if isinstance(prompt, str) else ""


def _of_ends(tables: Tables) -> Figures:
    """Whether ends that were drawn are among the ids that were rewarded, where each draw was rewarded once."""
    drawn, handed, last, known, lengths = 0, 0, 0, bool(tables.paid), set[int]()
    for batch in dict.fromkeys(paid.batch for paid in tables.paid):
        rows = [paid for paid in tables.paid if paid.batch == batch]
        draws = [draw for draw in tables.draws if last < draw.call <= batch]
        last = batch
        known &= len(draws) == len(rows) and all(paid.ids is not None for paid in rows)
        drawn += sum(draw.ended for draw in draws)
        handed += sum(bool(tables.setting.ends & set(paid.ids or ())) for paid in rows)
        lengths |= {len(draw.tokens) if draw.ended else -1 for draw in draws}
    return {
        "ends_drawn": drawn if known else None,
        "ends_handed": handed if known else None,
        "completions_paid": len(tables.paid),
        "draw_lengths": len(lengths),
    }


def judge(figures: Figures, controls: Mapping[str, Figures]) -> dict[str, verdicts.Judgement]:
    """Return what the registry says of its mechanisms that are planted here, by their failures' ids and their names."""
    return {
        f"{failure.id} {own.name}": verdicts.judge(dataclasses.replace(failure, mechanisms=(own,)), [figures], controls)
        for failure in failures.all()
        for own in failure.mechanisms
        if own.control in PLANTS
    }


# Mistakes, planted in tables


def control(tables: Tables) -> dict[str, Figures]:
    """Return the figures with each mistake planted in the tables, by the control's name."""
    return {name: measure(plant(tables)) for name, plant in PLANTS.items()}


def _trained(change: Callable[[Trained, int], Trained]) -> Plant:
    """Return what changes each row that is trained on, by the row and the id of the padding."""

    def plant(tables: Tables) -> Tables:
        rows = [change(row, tables.setting.pad) for row in tables.trained]
        return dataclasses.replace(tables, trained=tuple(row for row in rows if row.tokens))

    return plant


def _paid(column: str, change: Callable[[Tables], Sequence[Any]]) -> Plant:
    """Return what gives a column of what was paid other values."""

    def plant(tables: Tables) -> Tables:
        pairs = zip(tables.paid, change(tables))
        return dataclasses.replace(
            tables, paid=tuple(dataclasses.replace(paid, **{column: own}) for paid, own in pairs)
        )

    return plant


def _encode_again(row: Trained, pad: int) -> Trained:
    """Let the first token of each row be another one, as text that is encoded again has."""
    first = row.tokens[0]
    other = next(id for id in range(first.token + 1, first.token + 9) if id not in row.ids)
    ids = tuple(other if at == first.place else id for at, id in enumerate(row.ids))
    padded = tuple(other if at == first.at + 1 else id for at, id in enumerate(row.padded))
    token = dataclasses.replace(first, token=other)
    return dataclasses.replace(row, ids=ids, padded=padded, tokens=(token, *row.tokens[1:]))


def _move(row: Trained, pad: int) -> Trained:
    """Let each row be read without its first id."""
    later = [each for each in row.tokens if each.place > 1]
    tokens = tuple(dataclasses.replace(each, place=each.place - 1, at=each.at - 1) for each in later)
    return dataclasses.replace(row, ids=row.ids[1:], padded=row.padded[1:], tokens=tokens)


def _train_padding(row: Trained, pad: int) -> Trained:
    """Let the padding behind each row be trained on."""
    tokens = (*row.tokens, Token(len(row.ids), pad, at=len(row.padded) - 1))
    return dataclasses.replace(row, ids=(*row.ids, pad), padded=(*row.padded, pad), tokens=tokens)


def _keep_weights(tables: Tables) -> Tables:
    """Let what drew last, or another one, have the weights of the first draw: if the policy has moved, that shows."""
    calls, moves = [draw.call for draw in tables.draws], tables.setting.moves

    def change(draw: Draw) -> Draw:
        if draw.by == POLICY:
            return dataclasses.replace(draw, weights=tables.draws[0].weights) if draw.call == max(calls) else draw
        moved = moves.get(draw.call, 0.0) if draw.call > min(calls) else 0.0
        return dataclasses.replace(draw, logps=tuple(logp - moved for logp in draw.policy_logps)) if moved else draw

    return dataclasses.replace(tables, draws=tuple(map(change, tables.draws)))


def _mix_groups(tables: Tables) -> list[int]:
    """Let each prompt come once, so that a group has others beside it."""
    groups = Counter(batch for batch, _ in tables.groups)
    return [(paid.row + paid.group) % groups[paid.batch] for paid in tables.paid]


def _roll_columns(tables: Tables) -> list[Mapping[str, str]]:
    """Let each completion be rewarded with the columns of another group's."""
    by, columns = max(map(len, tables.groups.values()), default=0), [paid.columns for paid in tables.paid]
    return columns[by:] + columns[:by]


def _lose_ends(tables: Tables) -> list[Ids]:
    """Let the end of each completion be lost."""
    return [tuple(id for id in paid.ids or () if id not in tables.setting.ends) for paid in tables.paid]


PLANTS: dict[str, Plant] = {
    "text encoded again": _trained(_encode_again),
    "another context": _trained(_move),
    "padding is trained on": _trained(_train_padding),
    "ends left out": _paid("ids", _lose_ends),
    "columns in another order": _paid("columns", _roll_columns),
    "weights that stay": _keep_weights,
    "prompts that are not repeated": _paid("group", _mix_groups),
    "equal rewards": _paid("total", lambda tables: [0.0] * len(tables.paid)),
}
