"""What is drawn for a trainer, and what is paid for it: heard once, for the comparison of a step and for the ledger.

Listened to, on one trainer, and given back when the listener is detached:

- the policy's `generate`, an engine (`engines`), and the trainer's `rollout_func`: of calls within each other the
  outermost one,
- whether a rollout function's own code asks the policy for tokens, whose draws are not known then,
- the reward functions, a reward model, or a judge (`preferences`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from failurelab._unwrap import unwrap
from failurelab.errors import attempt
from failurelab.handles import is_unseen, listen_to, wrap_method
from failurelab.textbook import turns
from failurelab.textbook.draws import (
    RewardCalls,
    ends_of,
    listen_to_temperature,
    other_texts,
    read_generation,
    tokenizer_of,
)
from failurelab.textbook.engines import Engine, engines_of, read_answers
from failurelab.textbook.preferences import listen_to_preference
from failurelab.textbook.rows import Row

LIBRARIES = ("trl", "transformers")
MAKING = ("_generate", "_generate_single_turn")
SCORING = ("compute_loss", "training_step", "_prepare_inputs", "_generate_and_score_completions")


class Listener:
    """Hears what is drawn and what is paid; a subclass says what becomes of it, in the methods `take_...`.

    Args:
        trainer: that is listened to.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.problems: list[str] = []  # what could not be heard
        self._attached = contextlib.ExitStack()
        self._forget_draws()

    def _forget_draws(self) -> None:
        self._draws_now = self._rolls_out = False
        self._drawn: list[Row] = []  # since rewards were asked for last
        self._by_hand = self._generated = False  # whether a rollout function has called the model, or its `generate`
        self._paid = RewardCalls()  # functions that have answered, until all have

    # what a subclass says

    @property
    def _listens(self) -> bool:
        """Whether what is called now belongs to the training."""
        return not is_unseen()

    @property
    def _pays(self) -> bool:
        """Whether rewards that are asked for now do."""
        return self._listens

    def take_draws(self, drawing: Any, rows: list[Row], temperature: float | None) -> None:
        """Take what one call drew: the policy, another model, or an engine, which is None."""
        self._drawn += rows

    def take_rollouts(self, output: dict[str, Any], by_hand: bool) -> None:
        """Take what a rollout function returned, and whether it asked the policy for tokens by its own calls."""

    def take_rewards(self, asked: RewardCalls, drawn: list[Row], places: list[int | None]) -> None:
        """Take the rewards of one call of all functions, what was drawn since the last, and which of it each one is."""

    def before_draw(self) -> None:
        """Note what is to be known before `generate` is called."""

    # listening

    @property
    def policy(self) -> Any:
        """The model that is trained, without what accelerate puts around it."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def listen(self) -> None:
        """Begin to listen to draws and rewards."""
        trainer, policy = self.trainer, self.policy
        if callable(getattr(policy, "generate", None)):
            self.wrap(policy, "generate", self.hear_generate)
        for engine in engines_of(trainer, lambda text: list(tokenizer_of(trainer)(text)["input_ids"])):
            self.wrap(engine.owner, engine.name, functools.partial(self._hear_engine, engine))
        if getattr(trainer, "rollout_func", None) is not None:
            self.wrap(trainer, "rollout_func", self._hear_rollout)
            self._attached.callback(policy.register_forward_pre_hook(self._note_call).remove)
        self.listen_to_rewards()

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Listen to a method until the listener is detached."""
        self._attached.enter_context(wrap_method(owner, name, around, f"textbook: {name} recorded"))

    def listen_to_rewards(self) -> None:
        """Begin to listen to a trainer's reward functions, or its judge."""
        functions, note = getattr(self.trainer, "reward_funcs", None), functools.partial(self._safely, self._note_paid)
        if functions is None:  # Online DPO before it had any
            self._attached.enter_context(listen_to_preference(self.trainer, note))
            return
        self._attached.enter_context(listen_to(functions, note))
        for index, function in enumerate(functions):
            if isinstance(function, nn.Module):
                hook = function.register_forward_hook(functools.partial(self._note_model, index))
                self._attached.callback(hook.remove)

    def detach(self) -> None:
        """Give everything back."""
        self._attached.close()

    def _safely(self, work: Callable[..., None], *args: Any) -> None:
        """Do work of our own: after an error in it, what it concerns is not known."""
        if problem := attempt(work, *args):
            self.problems.append(problem)

    def ends(self) -> frozenset[int]:
        """Return the ids that end a completion, where a call names no others."""
        return ends_of(self.policy, tokenizer_of(self.trainer))

    # draws

    def hear_generate(self, method: Callable[..., Any], *args: Any, drawing: Any = None, **kwargs: Any) -> Any:
        """Call `generate` of the policy, or of another model, and take what it drew."""
        if self._draws_now or not self._listens:
            return method(*args, **kwargs)
        self.before_draw()
        drawing = self.policy if drawing is None or unwrap(drawing) is unwrap(self.policy) else drawing
        with self._drawing(), listen_to_temperature(drawing) as heard:
            output = method(*args, **kwargs)
        self._safely(self._record_generation, drawing, args, kwargs, output, next(reversed(heard), None))
        return output

    def _record_generation(
        self, drawing: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, temperature: float | None
    ) -> None:
        ends = ends_of(kwargs.get("generation_config"), drawing, tokenizer_of(self.trainer))
        try:
            rows = read_generation(drawing, ends, args, kwargs, output)
        except ValueError as error:
            self.problems.append(str(error))
        else:
            self.take_draws(drawing, rows, temperature)

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Within the block what is called draws, and not what it calls; a later forward pass may score its draws."""
        self._draws_now = self._generated = True
        try:
            yield
        finally:
            self._draws_now = False

    def _hear_engine(self, engine: Engine, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._draws_now or not self._listens:
            return method(*args, **kwargs)
        with self._drawing():
            output = method(*args, **kwargs)
        self._safely(self._record_answers, engine, method, args, kwargs, output)
        return output

    def _record_answers(self, engine: Engine, *called: Any) -> None:
        multiple = getattr(self.trainer.args, "pad_to_multiple_of", None) or 1
        rows, temperature = read_answers(engine, called, self.ends(), multiple)
        self.take_draws(self.policy if engine.owner is self.policy else None, rows, temperature)

    def _hear_rollout(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._listens:
            return method(*args, **kwargs)
        self._rolls_out, self._by_hand, self._generated = True, False, False
        try:
            output = method(*args, **kwargs)
        finally:
            self._rolls_out = False
        self._safely(self.take_rollouts, output, self._by_hand)
        return output

    def _note_call(self, model: nn.Module, args: Any) -> None:
        self._by_hand |= self._rolls_out and not (self._generated or self._draws_now or is_unseen())

    # rewards

    def _note_paid(self, index: int, args: Any, kwargs: dict[str, Any], rewards: Any) -> None:
        if not self._pays:
            return
        self._paid.kwargs[index] = kwargs
        self._paid.rewards[index] = [None if value is None else float(value) for value in rewards]
        if len(self._paid.rewards) == len(getattr(self.trainer, "reward_funcs", None) or [None]):
            asked, self._paid = self._paid, RewardCalls()
            drawn, self._drawn = self._drawn, []
            self.take_rewards(asked, drawn, self.find_draws(drawn, asked))

    def _note_model(self, index: int, model: nn.Module, args: Any, output: Any) -> None:
        self._safely(self._note_paid, index, (), {}, output.logits[:, 0].tolist())

    @property
    def is_paired(self) -> bool:
        """Whether two completions of each prompt are compared, all first ones before all second ones.

        They are drawn in the step that trains on them.
        """
        return any(kind.__name__ == "OnlineDPOTrainer" for kind in type(self.trainer).__mro__)

    @property
    def rolls_out(self) -> bool:
        """Whether completions come of a rollout function, of tools or of an environment."""
        names = ("rollout_func", "tools", "environment_factory", "environments")
        return any(getattr(self.trainer, name, None) for name in names)

    @property
    def scores_itself(self) -> bool:
        """Whether code that is no library's draws, groups or scores completions: it may have an order of its own."""
        return self.overrides(SCORING) and not self.is_paired and not self.rolls_out

    def overrides(self, names: Sequence[str], wholly: bool = False) -> bool:
        """Whether one of these methods is neither trl's nor transformers'; `wholly`: and asks theirs for nothing."""
        for method in (getattr(type(self.trainer), name, None) for name in names):
            home = (getattr(method, "__module__", None) or LIBRARIES[0]).partition(".")[0]
            asks = "super" in getattr(getattr(method, "__code__", None), "co_names", ())
            if home not in LIBRARIES and not (wholly and asks):
                return True
        return False

    def find_draws(self, drawn: Sequence[Row], asked: RewardCalls) -> list[int | None]:
        """Return which draw each completion is that is paid: in their order, by its ids, or by its text.

        A script may draw before its trainer does, and a loop of its own may put completions into another order.
        """
        count, texts = len(asked.table[0]), asked.given("completions")
        own_order = self.scores_itself or self.overrides(MAKING)
        if len(drawn) == count and not (own_order and self._other_texts(drawn, texts)):
            return [*range(count)]
        ids = asked.given("completion_ids") if len(drawn) != count else ()
        left, found, before = dict(enumerate(drawn)), list[int | None](), len(drawn) - count
        ways: list[Callable[[Row, int], bool]] = [lambda row, number: not self._other_texts([row], [texts[number]])]
        if ids:  # the first of several turns goes on; a later one is cut where a completion gets too long
            before = 0
            ways = [
                lambda row, number: row.completion == tuple(ids[number]),
                lambda row, number: turns.goes_on(row, tuple(ids[number])),
            ]
        for number in range(min(count, len(ids or texts))):
            places = sorted(left, key=lambda place: place != number + before)  # in their order, if nothing is against
            place = next((place for fits in ways for place in places if fits(left[place], number)), None)
            left.pop(place, None)  # type: ignore[arg-type]
            found.append(place)
        found += [None] * (count - len(found))
        return [*range(count)] if None in found and len(drawn) == count else found

    def _other_texts(self, rows: Sequence[Row], texts: Sequence[Any]) -> list[tuple[str, str]]:
        return other_texts(tokenizer_of(self.trainer), [row.completion for row in rows], texts)
