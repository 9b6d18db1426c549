"""The ledger: each token that is trained on beside its draw.

    with textbook.ledger(trainer) as ledger:
        trainer.train()
    print(ledger)                  # the verdicts; in a notebook `ledger` alone draws the tokens
    ledger.table("trained")        # rows for a DataFrame; also "draws" and "paid"

A policy gradient is right only for tokens that the policy drew, scored behind the ids that they were drawn behind. Text
that is encoded again (TRL #5224), padding that is trained on, a stale engine and rows in another order break this, and
loss, reward and grad_norm look healthy. Nothing of the trainer's own tensors is believed here:

- draws: what `generate` of any model, or an engine, was given and gave;
- trained: what the model read in each forward pass of the loss, and the gradient of its logits. That of a score is
  weight * (onehot - softmax) / temperature, so the scored token, its weight and the temperature are read from it;
- paid: what the reward functions were given and returned.

The figures made of these three are in `balance`.
"""

import functools
import html
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import transformers
from transformers.trainer_callback import TrainerCallback

from failurelab import failures, rollouts
from failurelab._unwrap import unwrap
from failurelab.failures.predicates import Value
from failurelab.failures.verdicts import Judgement
from failurelab.handles import is_unseen, keep_random_state
from failurelab.textbook.algorithms import count_uses, group_size
from failurelab.textbook.balance import (
    DRAWN,
    FOREIGN,
    MOVED,
    PADDING,
    POLICY,
    UNKNOWN,
    Conditions,
    Draw,
    Paid,
    Tables,
    Trained,
    control,
    judge,
    measure,
)
from failurelab.textbook.comparison import drops_out
from failurelab.textbook.draws import RewardCalls, decode, other_texts, pad_id, plain_text, tokenizer_of
from failurelab.textbook.gradient import score_old
from failurelab.textbook.listener import MAKING, SCORING, Listener
from failurelab.textbook.ranks import digest, fingerprint, is_spread, own_number, several
from failurelab.textbook.reading import Reader
from failurelab.textbook.recorder import own_precision
from failurelab.textbook.rows import Row

Scores = tuple[float, ...]  # log-probabilities of the tokens of a draw
ENGINE = "an engine"
KEPT = 8  # optimizer steps, the last ones
_COLORS = {DRAWN: "#cfe3f1", MOVED: "#fbdcc4", FOREIGN: "#f3b8b0", PADDING: "#dddddd", UNKNOWN: "#ffffff"}
_SHOWN = 4  # rows that are drawn in a notebook
_UNJUDGED = ("positions_off", "trained_gap", "draws_overdue", "rows_turned", "other_texts")  # by no failure's mechanism


class Ledger(Listener, TrainerCallback):
    """Listens to a trainer while it trains, and has the three tables of what it saw in the last KEPT steps.

    Args:
        trainer: one that draws completions and trains on them: GRPO, RLOO, Online DPO, or of one's own.
    """

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.draws: list[Draw] = []
        self.paid: list[Paid] = []
        given = lambda: self._drawn_at, self._safely, self.problems.append
        self._reader = Reader(self.policy, self._note_step, *given)
        self._asked_by_hand = False
        self._fresh: list[Draw] = []  # that were not paid yet
        self._inner: int | None = None  # the policy's weights as it drew: within the call others may have been put in
        self._calls = 0  # of what draws
        self._weights: dict[int, int | None] = {}  # of the policy, by steps done
        # What another one than the policy drew last, with the policy's scores then; and of each such call how far the
        # policy has moved until the next one.
        self._last: tuple[int, list[Row], list[Scores], float | None] | None = None
        self._moves: dict[int, float] = {}

    # listening

    def __enter__(self) -> "Ledger":
        self.attach()
        self.trainer.add_callback(self)
        self._attached.callback(self.trainer.remove_callback, self)
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Begin to listen, to all models that draw: a script may let another one than the policy do so."""
        own = transformers.GenerationMixin.generate

        @functools.wraps(own)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            return self.hear_generate(functools.partial(own, model), *args, drawing=model, **kwargs)

        self._attached.enter_context(mock.patch.object(transformers.GenerationMixin, "generate", generate))
        self._attached.callback(unwrap(self.policy).register_forward_pre_hook(self._note_weights).remove)
        self._reader.attach(self._attached)
        self.listen()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget steps that are too long ago."""
        first = state.global_step - KEPT
        kept = [made for made in self._reader.passes if made.rows[0].step >= first]
        if len(kept) < len(self._reader.passes):
            self._reader.passes = kept
            self.draws = [draw for draw in self.draws if draw.step >= first]
            self.paid = [paid for paid in self.paid if paid.step >= first]

    @property
    def _step(self) -> int:
        return int(self.trainer.state.global_step)

    # draws

    def take_draws(self, drawing: Any, rows: list[Row], temperature: float | None) -> None:
        """Write draws down, with what the policy gives their tokens now."""
        self._calls += 1
        drawn, by, weights, self._inner = [row for row in rows if row.completion], POLICY, self._inner, None
        with keep_random_state():
            own = self._score(self.policy, drawn, temperature)
            told: list[Scores | None] = [*own]
            if drawing is None:
                by, weights = ENGINE, None
                told = [None if row.engine_logps is None else tuple(row.engine_logps.tolist()) for row in drawn]
            elif drawing is not self.policy:
                by, weights = type(drawing).__name__, _number(drawing)
                told = [*self._score(drawing, drawn, temperature)]
            if drawing is not self.policy and drawn:
                self._note_move()
                self._last = self._calls, drawn, own, temperature
        scored = iter(zip(told, own))
        for place, row in enumerate(rows):
            number = self.draws[-1].number + 1 if self.draws else 0
            logps, policy_logps = next(scored) if row.completion else ((), ())
            ids, scores = (row.prompt, row.completion, row.ended), (temperature, logps, policy_logps)
            draw = Draw(number, self._calls, place, *ids, self._step, by, weights, *scores)
            self.draws.append(draw)
            self._fresh.append(draw)
        super().take_draws(drawing, rows, temperature)

    def _note_move(self) -> None:
        """Measure how far the policy has moved since another one drew, on those tokens: others differ."""
        if self._last:
            call, rows, before, temperature = self._last
            now = self._score(self.policy, rows, temperature)
            apart = [abs(one - two) for pair in zip(before, now) for one, two in zip(*pair)]
            self._moves[call] = sum(apart) / len(apart)

    def _score(self, model: Any, rows: list[Row], temperature: float | None) -> list[Scores]:
        """Return the log-probabilities of each row's completion, by a model as it is now."""
        scored = score_old(model, rows, temperature or 1.0, pad_id(self.trainer)) if rows else []
        return [() if row.old_logps is None else tuple(row.old_logps[: len(row.completion)].tolist()) for row in scored]

    def take_rollouts(self, output: dict[str, Any], by_hand: bool) -> None:
        """Keep whether a rollout function asked the policy for tokens by its own calls."""
        self._asked_by_hand |= by_hand

    def _policy_weights(self) -> int | None:
        """Return a number for the policy's weights, which change with a step alone."""
        if self._step not in self._weights:
            self._weights[self._step] = _number(self.policy)
        return self._weights[self._step]

    def _note_weights(self, model: Any, args: Any) -> None:
        """Note the weights that draw, from within: a call may put others in, and the policy's back again."""
        if self._draws_now and self._inner is None and not is_unseen():
            self._inner = _number(self.policy)

    # trained

    def _note_step(self) -> dict[str, Any]:
        return {"rank": own_number(), "step": self._step, "weights": self._policy_weights()}

    @property
    def trained(self) -> list[Trained]:
        """Rows of forward passes with the tokens that have a gradient, the last KEPT steps of them."""
        return [row for made in self._reader.passes for row in made.rows if row.tokens]

    @property
    def _drawn_at(self) -> float:
        """The temperature of the last draw."""
        return next((draw.temperature for draw in reversed(self.draws)), None) or 1.0

    # paid

    @property
    def _pays(self) -> bool:
        return not is_unseen() and bool(self.trainer.model.training)

    def take_rewards(self, asked: RewardCalls, drawn: list[Row], places: list[int | None]) -> None:
        """Write down what completions are paid, each beside its draw where that is known."""
        table, count, args = asked.table, len(asked.table[0]), self.trainer.args
        fresh, self._fresh = self._fresh, []
        if any(len(column) != count for column in table):
            self.problems.append("the reward functions returned different numbers of rewards")
            return
        kwargs = {name: value for own in asked.kwargs.values() for name, value in own.items()}
        columns = {
            name: value for name, value in kwargs.items() if isinstance(value, list | tuple) and len(value) == count
        }
        texts, ids = (columns.get(name) or [None] * count for name in ("completions", "completion_ids"))
        often = Counter(draw.tokens for draw in fresh)
        weights = getattr(args, "reward_weights", None) or [1.0] * len(table)
        penalty = getattr(args, "missing_eos_penalty", None)
        size, tokenizer = group_size(self.trainer), tokenizer_of(self.trainer)
        for row, (place, own, given) in enumerate(zip(places, ids, texts)):
            draw = None if place is None else fresh[place]
            if draw and len(fresh) != count:  # of draws of the same tokens, or of several turns, it is not known which
                draw = draw if often[draw.tokens] == 1 and (own is None or draw.tokens == tuple(own)) else None
            values = tuple(column[row] for column in table)
            known = [weight * value for weight, value in zip(weights, values) if value is not None and value == value]
            total = sum(known) if known else None
            if total is not None and penalty is not None and draw is not None and not draw.ended:
                total -= penalty
            text = plain_text(given)
            self.paid.append(
                Paid(
                    row=row,
                    batch=self._calls,
                    step=self._step,
                    group=row % (count // 2) if self.is_paired else row // size,
                    rewards=values,
                    total=total,
                    text=text,
                    other_text=bool(other_texts(tokenizer, [draw.tokens], [given]))
                    if draw and text is not None
                    else None,
                    columns={name: repr(value[row]) for name, value in columns.items()},
                    ids=tuple(own) if own is not None else None if draw is None else draw.tokens,
                    draw=draw,
                )
            )

    # what is made of it

    @property
    def tables(self) -> Tables:
        """What was seen, and the setting that it is judged in."""
        trainer, args = self.trainer, self.trainer.args
        if not several():  # another process may not ask now, and a sharded model's score takes all
            with keep_random_state():
                self._note_move()
        own_rollouts = getattr(trainer, "rollout_func", None) is not None or self.overrides(MAKING, wholly=True)
        narrow = own_precision(trainer) is not None
        size = min(each.element_size() for each in self.policy.parameters())
        setting = Conditions(
            pad=pad_id(trainer),
            ends=self.ends(),
            draws_known=not own_rollouts,
            by_hand=self._asked_by_hand,
            groups_known=not (several() or own_rollouts or self.overrides(SCORING, wholly=True)),
            rewards_known=not self.overrides(("_calculate_rewards",), wholly=True)
            and getattr(args, "multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize",
            steps_allowed=max(0, math.ceil(count_uses(args) / max(1, args.gradient_accumulation_steps)) - 1),
            rounding=rollouts.ROUNDING[2 if narrow else size],
            noisy=drops_out(self.policy),
            moves=self._moves,
            rows=_rows_of(trainer),
            decode=functools.partial(decode, tokenizer_of(trainer)),
            weights=self._weights,
        )
        return Tables(tuple(self.draws), tuple(self.trained), tuple(self.paid), setting)

    @property
    def figures(self) -> dict[str, Value]:
        """The figures of the ledger by their names in docs/figures.md; None where one is not known."""
        return measure(self.tables)

    @property
    def controls(self) -> dict[str, dict[str, Value]]:
        """The same figures with each mistake planted in these tables, by the control's name."""
        return control(self.tables)

    @property
    def verdicts(self) -> dict[str, Judgement]:
        """What the registry says of each mechanism that is planted here, by its failure's id and its name."""
        return judge(self.figures, self.controls)

    def table(self, name: str) -> list[dict[str, Any]]:
        """Return a table, a dictionary for each line: `draws`, `trained` (a line for each token) or `paid`."""
        return list(getattr(self.tables, f"lines_of_{name}")())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the verdicts, the figures that none is about beside their healthy bands, and what is not known."""
        figures = self.figures
        for name, own in judge(figures, self.controls).items():
            yield f"{name}: {', '.join(filter(None, (own.verdict, own.says, own.missing)))}"
        for name in _UNJUDGED:
            healthy = failures.figures.table()[name].healthy
            yield healthy.describe(figures) if healthy and figures[name] is not None else f"{name} is not measured"
        yield from (f"not known: {line}" for line in dict.fromkeys(self.problems))

    def _repr_html_(self) -> str:
        """A few rows that are trained on: the tokens that were drawn, and those trained on with their states."""
        tables, tokenizer, lines, apart = self.tables, tokenizer_of(self.trainer), [], 0
        states = zip(tables.trained, tables.states)
        for row, own in sorted(states, key=lambda pair: all(state == DRAWN for state, _ in pair[1]))[:_SHOWN]:
            draw = next((draw for _, draw in own if draw is not None), None)
            drawn = [(token, DRAWN) for token in (draw.tokens if draw else ())]
            trained = [(token.token, state) for token, (state, _) in zip(row.tokens, own)]
            apart += any(state != DRAWN for _, state in trained)
            for name, tokens in (("drawn", drawn), ("trained", trained)):
                cells = "".join(
                    f'<td style="background:{_COLORS[state]};color:#111;border:1px solid #333;padding:1px 4px" '
                    f'title="{state}">{html.escape(repr(tokenizer.decode([token]))[1:-1])}</td>'
                    for token, state in tokens
                )
                lines.append(f"<tr><th>{name}</th>{cells}</tr>")
        alt = f"Tokens drawn beside tokens trained, of {len(lines) // 2} rows; in {apart} of them they differ."
        checks = "<br>".join(map(html.escape, self._lines()))
        return f'<div role="img" aria-label="{alt}"><table>{"".join(lines)}</table></div><p>{checks}</p>'


ledger = Ledger  # `with textbook.ledger(trainer) as ledger: trainer.train()`


def _number(model: Any) -> int | None:
    """Return a number for a model's weights; None where each rank has a part of them."""
    if is_spread(model):
        return None
    return digest(repr(fingerprint(list(model.parameters()))).encode())


def _rows_of(trainer: Any, most: int = 1024) -> tuple[Mapping[str, Any], ...]:
    """Return the rows of a dataset that is small enough to be looked through."""
    dataset: Any = getattr(trainer, "train_dataset", None)
    names = getattr(dataset, "column_names", None) or ()
    if "prompt" not in names or not hasattr(dataset, "__len__") or len(dataset) > most:
        return ()
    return tuple(dict(dataset[place]) for place in range(len(dataset)))
