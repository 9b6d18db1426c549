"""The ledger: each token that is trained on beside its draw.

    with textbook.ledger(trainer) as ledger:
        trainer.train()
    print(ledger)                  # the checks; in a notebook `ledger` alone draws the tokens
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

import contextlib
import functools
import hashlib
import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import transformers
from transformers.trainer_callback import TrainerCallback

from failurelab import rollouts
from failurelab._unwrap import unwrap
from failurelab.errors import attempt
from failurelab.failures.predicates import Value
from failurelab.handles import is_unseen, keep_random_state, wrap_method
from failurelab.textbook.algorithms import ALGORITHMS, group_size
from failurelab.textbook.balance import (
    POLICY,
    Balance,
    Conditions,
    Draw,
    Paid,
    Tables,
    Trained,
    check,
    control,
    measure,
)
from failurelab.textbook.comparison import drops_out
from failurelab.textbook.draws import (
    RewardCalls,
    collect_rewards,
    decode,
    ends_of,
    listen_to_temperature,
    other_texts,
    plain_text,
    read_generation,
    tokenizer_of,
)
from failurelab.textbook.engines import Engine, engines_of, read_answers
from failurelab.textbook.gradient import score_old
from failurelab.textbook.ranks import fingerprint, is_spread, own_number, several
from failurelab.textbook.reading import Reader
from failurelab.textbook.recorder import own_precision, pad_id
from failurelab.textbook.rows import Ids, Row
from failurelab.textbook.turns import AskedContexts

ENGINE = "an engine"
_LIBRARIES = ("trl", "transformers")
_MAKERS = ("rollout_func", "_generate", "_generate_single_turn")
_GROUPING = ("_generate_and_score_completions", "_prepare_inputs", "compute_loss", "training_step")
_COLORS = {"drawn": "#cfe3f1", "asked": "#cfe3f1", "moved": "#fbdcc4", "foreign": "#f3b8b0", "padding": "#dddddd"}


class Ledger(TrainerCallback):
    """Listens to a trainer while it trains, and has the three tables of what it saw.

    Args:
        trainer: one that draws completions and trains on them: GRPO, RLOO, Online DPO, or of one's own.
        most: optimizer steps that are kept, the last ones.
    """

    def __init__(self, trainer: Any, most: int = 8):
        self.trainer, self.most = trainer, most
        self.draws: list[Draw] = []
        self.paid: list[Paid] = []
        self.problems: list[str] = []
        self._stack = contextlib.ExitStack()
        given = lambda: self._drawn_at, self._safely, self.problems.append
        self._reader = Reader(self._policy, self._note_step, *given)
        self._asked = AskedContexts(pad_id(trainer))
        self._generates = self._rolls_out = False
        self._inner: int | None = None  # the policy's weights as it drew: within the call others may have been put in
        self._calls = self._closed = 0  # calls of what draws; draws that were paid
        self._weights: dict[int, int | None] = {}  # of the policy, by steps done
        self._first: list[Row] = []  # that another one than the policy drew first, with the policy's scores
        self.moved: float | None = None

    # listening

    def __enter__(self) -> "Ledger":
        self.attach()
        self.trainer.add_callback(self)
        self._stack.callback(self.trainer.remove_callback, self)
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Begin to listen."""
        trainer, enter = self.trainer, self._stack.enter_context
        policy = self._policy
        if callable(getattr(policy, "generate", None)):
            enter(wrap_method(policy, "generate", self._generate, "ledger: draws"))
        own = transformers.GenerationMixin.generate

        @functools.wraps(own)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            return self._generate(functools.partial(own, model), *args, drawing=model, **kwargs)

        enter(mock.patch.object(transformers.GenerationMixin, "generate", generate))
        for engine in engines_of(trainer, lambda text: list(tokenizer_of(trainer)(text)["input_ids"])):
            around = functools.partial(self._ask_engine, engine)
            enter(wrap_method(engine.owner, engine.name, around, "ledger: an engine's draws"))
        if getattr(trainer, "rollout_func", None) is not None:
            enter(wrap_method(trainer, "rollout_func", self._rollout, "ledger: rollouts"))
        self._stack.callback(unwrap(policy).register_forward_pre_hook(self._note_weights).remove)
        self._stack.callback(policy.register_forward_pre_hook(self._note_asked, with_kwargs=True).remove)
        self._reader.attach(self._stack)
        enter(collect_rewards(trainer, self._is_paid, self._note_rewards, self._safely))

    def detach(self) -> None:
        """Give everything back."""
        self._stack.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget steps that are too long ago."""
        first = state.global_step - self.most
        kept = [made for made in self._reader.passes if made.rows[0].step >= first]
        if len(kept) < len(self._reader.passes):
            self._reader.passes = kept
            gone = sum(draw.step < first for draw in self.draws)
            self._closed, self.draws = max(0, self._closed - gone), self.draws[gone:]
            self.paid = [paid for paid in self.paid if paid.step >= first]

    @property
    def _policy(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    @property
    def _is_paired(self) -> bool:
        kinds = {kind.__name__ for kind in type(self.trainer).__mro__} & set(ALGORITHMS)
        return any(ALGORITHMS[name].is_paired for name in kinds)

    @property
    def _step(self) -> int:
        return int(self.trainer.state.global_step)

    def _safely(self, work: Callable[..., None], *args: Any) -> None:
        """Do work of our own: after an error in it, what it concerns is not known."""
        if problem := attempt(work, *args):
            self.problems.append(problem)

    # draws

    def _rollout(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._rolls_out = True
        try:
            return method(*args, **kwargs)
        finally:
            self._rolls_out = False

    def _generate(self, method: Callable[..., Any], *args: Any, drawing: Any = None, **kwargs: Any) -> Any:
        if self._generates or is_unseen():
            return method(*args, **kwargs)
        self._generates, self._inner = True, None
        try:
            with listen_to_temperature(self._policy if drawing is None else drawing) as heard:
                output = method(*args, **kwargs)
        finally:
            self._generates = False
        self._safely(self._note_generation, drawing, args, kwargs, output, next(reversed(heard), None))
        return output

    def _note_generation(
        self, drawing: Any, args: Any, kwargs: dict[str, Any], output: Any, temperature: float | None
    ) -> None:
        policy = self._policy
        if drawing is None or unwrap(drawing) is unwrap(policy):
            drawing = policy
        config = kwargs.get("generation_config")
        ends = ends_of(config, drawing, tokenizer_of(self.trainer))
        rows = read_generation(drawing, ends, args, kwargs, output)
        if drawing is policy:
            self._keep(POLICY, self._inner, rows, temperature)
            return
        with keep_random_state():
            scored = score_old(drawing, rows, temperature or 1.0, pad_id(self.trainer))
        weights = _number(drawing)
        self._keep(type(drawing).__name__, weights, scored, temperature, [_scores(row) for row in scored])

    def _ask_engine(self, engine: Engine, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._generates or is_unseen():
            return method(*args, **kwargs)
        self._generates = True
        try:
            output = method(*args, **kwargs)
        finally:
            self._generates = False
        self._safely(self._note_answers, engine, method, args, kwargs, output)
        return output

    def _note_answers(self, engine: Engine, *called: Any) -> None:
        rows, temperature = read_answers(engine, called, ends_of(self._policy, tokenizer_of(self.trainer)))
        logps = [None if row.engine_logps is None else tuple(row.engine_logps.tolist()) for row in rows]
        by = POLICY if engine.owner is self._policy else ENGINE
        self._keep(by, _number(self._policy) if by == POLICY else None, rows, temperature, logps)

    def _keep(
        self,
        by: str,
        weights: int | None,
        rows: Sequence[Row],
        temperature: float | None,
        logps: Sequence[tuple[float, ...] | None] | None = None,
    ) -> None:
        """Write draws down, with what the policy gives their tokens now."""
        self._calls += 1
        drawn = [row for row in rows if row.completion]
        with keep_random_state():
            pad = pad_id(self.trainer)
            scored = iter(score_old(self._policy, drawn, temperature or 1.0, pad) if drawn else [])
            if by != POLICY and drawn:
                self._measure_move(drawn, temperature, pad)
        for number, row in enumerate(rows):
            own = _scores(next(scored)) if row.completion else ()
            told = own if by == POLICY else None if logps is None else logps[number]
            self.draws.append(
                Draw(
                    number=self.draws[-1].number + 1 if self.draws else 0,
                    call=self._calls,
                    row=number,
                    context=row.prompt,
                    tokens=row.completion,
                    ended=row.ended,
                    step=self._step,
                    by=by,
                    weights=weights,
                    temperature=temperature,
                    logps=told,
                    policy_logps=own,
                )
            )

    def _measure_move(self, drawn: list[Row], temperature: float | None, pad: int) -> None:
        """Measure how far the policy has moved since another one drew first."""
        if not self._first:
            self._first = score_old(self._policy, drawn, temperature or 1.0, pad)
            self.moved = 0.0
            return
        now = score_old(self._policy, self._first, temperature or 1.0, pad)
        pairs = [(a, b) for one, two in zip(self._first, now) for a, b in zip(_scores(one), _scores(two))]
        self.moved = sum(abs(a - b) for a, b in pairs) / len(pairs)

    def _policy_weights(self) -> int | None:
        """Return a number for the policy's weights, which change with a step alone."""
        if self._step not in self._weights:
            self._weights[self._step] = _number(self._policy)
        return self._weights[self._step]

    def _note_weights(self, model: Any, args: Any) -> None:
        """Note the weights that draw, from within: a call may put others in, and the policy's back again."""
        if self._generates and self._inner is None and not is_unseen():
            self._inner = _number(self._policy)

    # trained

    def _note_asked(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._rolls_out and not self._generates and not is_unseen():
            self._safely(self._asked.note, args, kwargs)

    def _note_step(self) -> dict[str, Any]:
        return {"rank": own_number(), "step": self._step, "weights": self._policy_weights()}

    @property
    def trained(self) -> list[Trained]:
        """Rows of forward passes with the tokens that have a gradient, the last `most` steps of them."""
        return [row for made in self._reader.passes for row in made.rows if row.tokens]

    @property
    def _drawn_at(self) -> float:
        """The temperature of the last draw."""
        return next((draw.temperature for draw in reversed(self.draws)), None) or 1.0

    # paid

    def _is_paid(self) -> bool:
        return not is_unseen() and bool(self.trainer.model.training)

    def _note_rewards(self, asked: RewardCalls) -> None:
        kwargs = {name: value for own in asked.kwargs.values() for name, value in own.items()}
        table = asked.table
        count = len(table[0])
        if any(len(column) != count for column in table):
            self.problems.append("the reward functions returned different numbers of rewards")
            return
        fresh, self._closed = self.draws[self._closed :], len(self.draws)
        texts, ids = kwargs.get("completions") or [], kwargs.get("completion_ids") or []
        drawn = self._link(fresh, texts, ids, count)
        tokenizer, size, batch = tokenizer_of(self.trainer), group_size(self.trainer), self._calls
        columns = {
            name: value for name, value in kwargs.items() if isinstance(value, list | tuple) and len(value) == count
        }
        weights = getattr(self.trainer.args, "reward_weights", None) or [1.0] * len(table)
        penalty = getattr(self.trainer.args, "missing_eos_penalty", None)
        for place in range(count):
            values = tuple(column[place] for column in table)
            known = [weight * value for weight, value in zip(weights, values) if value is not None and value == value]
            draw = drawn[place]
            total = sum(known) if known else None
            if total is not None and penalty is not None and draw is not None and not draw.ended:
                total -= penalty
            text = plain_text(texts[place]) if len(texts) == count else None
            other = bool(other_texts(tokenizer, [draw.tokens], [texts[place]])) if draw and text is not None else None
            self.paid.append(
                Paid(
                    row=place,
                    batch=batch,
                    step=self._step,
                    group=place % (count // 2) if self._is_paired else place // size,
                    rewards=values,
                    total=total,
                    text=text,
                    other_text=other,
                    prompt=repr(columns["prompts"][place]) if "prompts" in columns else None,
                    columns={name: repr(value[place]) for name, value in columns.items()},
                    ids=tuple(ids[place]) if len(ids) == count else None if draw is None else draw.tokens,
                    draw=None if draw is None else draw.number,
                    sequence=None if draw is None else draw.context + draw.tokens,
                )
            )

    def _in_order(self, fresh: Sequence[Draw], texts: Sequence[Any]) -> Sequence[Draw]:
        """Return draws in the order of the texts: a loop of one's own may put those of a prompt together."""
        tokenizer, calls = tokenizer_of(self.trainer), dict[int, list[Draw]]()
        for draw in fresh:
            calls.setdefault(draw.call, []).append(draw)
        turned = [draw for own in zip(*calls.values()) for draw in own]
        for order in [fresh, turned] if len(turned) == len(fresh) else []:
            if not other_texts(tokenizer, [draw.tokens for draw in order], texts):
                return order
        return fresh

    def _link(self, fresh: Sequence[Draw], texts: Sequence[Any], ids: Sequence[Any], count: int) -> list[Draw | None]:
        """Return which draw each completion is that is paid: in the order of the draws, or by ids or text."""
        if len(fresh) == count:
            return [*self._in_order(fresh, texts)]
        by_ids: dict[Ids, list[Draw]] = {}
        for draw in fresh:
            by_ids.setdefault(draw.tokens, []).append(draw)
        if len(ids) != count:
            return [None] * count
        found = [by_ids.get(tuple(own), []) for own in ids]
        return [some[0] if len(some) == 1 else None for some in found]

    # what is made of it

    @property
    def tables(self) -> Tables:
        """What was seen, and the setting that it is judged in."""
        trainer, kind = self.trainer, type(self.trainer)
        args = trainer.args
        own_rollouts = getattr(trainer, "rollout_func", None) is not None or any(
            _is_own(kind, name) for name in _MAKERS[1:]
        )
        uses = (getattr(args, "steps_per_generation", None) or 1) * (getattr(args, "num_iterations", None) or 1)
        narrow = own_precision(trainer) is not None
        size = min(each.element_size() for each in self._policy.parameters())
        setting = Conditions(
            pad=pad_id(trainer),
            ends=ends_of(self._policy, tokenizer_of(trainer)),
            draws_known=not own_rollouts,
            asked=frozenset(self._asked.contexts) if self._asked.contexts is not None else None,
            groups_known=not several() and not any(_is_own(kind, name) for name in _GROUPING) and not own_rollouts,
            rewards_known=not _is_own(kind, "_calculate_rewards")
            and getattr(args, "multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize",
            steps_allowed=max(0, math.ceil(uses / max(1, args.gradient_accumulation_steps)) - 1),
            rounding=rollouts.ROUNDING[2 if narrow else size],
            noisy=drops_out(self._policy),
            moved=self.moved,
            paired=self._is_paired,
            temperatures=tuple(made.temperatures for made in self._reader.passes if made.temperatures),
            left_over=max((made.left_over for made in self._reader.passes if made.left_over is not None), default=None),
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
    def checks(self) -> list[Balance]:
        """What balances, what does not, and of what that is not known."""
        return check(self.figures, self.controls)

    def table(self, name: str) -> list[dict[str, Any]]:
        """Return a table, a dictionary for each line: `draws`, `trained` (a line for each token) or `paid`."""
        return list(getattr(self.tables, f"lines_of_{name}")())

    def __str__(self) -> str:
        return "\n".join([*map(str, self.checks), *(f"not known: {line}" for line in dict.fromkeys(self.problems))])

    def strip(self, rows: int = 4) -> list[tuple[list[str], list[tuple[str, str]]]]:
        """Return a few rows that are trained on: the tokens that were drawn, and those trained on with their states."""
        tables, tokenizer = self.tables, tokenizer_of(self.trainer)
        states, draws = tables.states, {draw.number: draw for draw in self.draws}
        shown = sorted(range(len(states)), key=lambda place: all(each == "drawn" for each, _ in states[place]))
        strips = []
        for place in shown[:rows]:
            row, own = tables.trained[place], states[place]
            number = next((draw for _, draw in own if draw is not None), None)
            drawn = [] if number is None else [tokenizer.decode([token]) for token in draws[number].tokens]
            marked = [(tokenizer.decode([token.token]), state) for token, (state, _) in zip(row.tokens, own)]
            strips.append((drawn, marked))
        return strips

    def _repr_html_(self) -> str:
        lines, apart = [], 0
        for drawn, trained in self.strip():
            apart += any(state not in ("drawn", "asked") for _, state in trained)
            for name, tokens in (("drawn", [(token, "drawn") for token in drawn]), ("trained", trained)):
                cells = "".join(
                    f'<td style="background:{_COLORS[state]};color:#111;border:1px solid #333;padding:1px 4px" '
                    f'title="{state}">{html.escape(repr(token)[1:-1])}</td>'
                    for token, state in tokens
                )
                lines.append(f"<tr><th>{name}</th>{cells}</tr>")
        alt = f"Tokens drawn beside tokens trained, of {len(lines) // 2} rows; in {apart} of them they differ."
        checks = "<br>".join(html.escape(str(each)) for each in self.checks)
        return f'<div role="img" aria-label="{alt}"><table>{"".join(lines)}</table></div><p>{checks}</p>'


ledger = Ledger  # `with textbook.ledger(trainer) as ledger: trainer.train()`


def _is_own(kind: type, name: str) -> bool:
    """Whether a method is neither trl's nor transformers', and asks theirs for nothing."""
    method = getattr(kind, name, None)
    home = getattr(method, "__module__", None) or "trl"
    return (
        home.partition(".")[0] not in _LIBRARIES
        and "super" not in getattr(method, "__code__", _is_own.__code__).co_names
    )


def _number(model: Any) -> int | None:
    """Return a number for a model's weights; None where each rank has a part of them."""
    if is_spread(model):
        return None
    told = repr(fingerprint(list(model.parameters()))).encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:7], "big")


def _scores(row: Row) -> tuple[float, ...]:
    """Return the log-probabilities of a row that was scored, without those of its padding."""
    scores = row.old_logps
    return () if scores is None else tuple(scores[: len(row.completion)].tolist())


def _rows_of(trainer: Any, most: int = 1024) -> tuple[Mapping[str, Any], ...]:
    """Return the rows of a dataset that is small enough to be looked through."""
    dataset: Any = getattr(trainer, "train_dataset", None)
    names = getattr(dataset, "column_names", None) or ()
    if "prompt" not in names or not hasattr(dataset, "__len__") or len(dataset) > most:
        return ()
    return tuple(dict(dataset[place]) for place in range(len(dataset)))
