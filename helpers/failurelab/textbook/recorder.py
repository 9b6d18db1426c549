"""What a trainer really did in an optimizer step, from independent evidence.

Listened to, on this one trainer, and given back afterwards:

- `model.generate`, an engine (`engines`), or the trainer's `rollout_func`: the prompts that were given, and the token
  ids that were drawn, in one turn or several (`turns`),
- the reward functions, or a judge: the texts that they were given, and what they returned,
- `training_step` and `compute_loss`: which completions a micro-batch trains on; Online DPO draws them in its step,
- `accelerator.clip_grad_norm_`: the gradient before it is clipped.

The trainer's own advantages, masks and log-probabilities are not read. A subclass may override any method: each of
these is called on the object at hand. Evidence is looked at too: completions that are trained on twice, a reference
model that changes, and a gradient that the optimizer is not given are wrong whatever the gradient is.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn

from failurelab.errors import attempt, raises_own
from failurelab.handles import is_unseen
from failurelab.textbook import turns
from failurelab.textbook.algorithms import algorithm_of, count_uses, group_size
from failurelab.textbook.apart import COSINE, SIZE, measure_apart, norm
from failurelab.textbook.draws import RewardCalls, pad_id
from failurelab.textbook.engines import logps_of
from failurelab.textbook.gradient import Gradient, Precision, Reference, reward_table, score_old, with_kl
from failurelab.textbook.listener import LIBRARIES, Listener
from failurelab.textbook.ranks import ALONE, Ranks, digest, engine_of, fingerprint, full_gradient, several, whole
from failurelab.textbook.reading import Pass, Reader
from failurelab.textbook.rows import Ids, Row, group_in_order
from failurelab.textbook.scores import without_adapters

T = TypeVar("T")
_BY_MICRO_BATCH = ("bnpo",)  # losses that weigh a row by the others of its micro-batch
MIXED = "groups of several prompts"


@dataclasses.dataclass
class Evidence:
    """What is known of one optimizer step."""

    rows: list[Row]  # of all generations that the step takes rows from
    gradient: Gradient  # the trainer's, before it was clipped, in float32; zeros where a parameter got none
    problems: list[str]  # why nothing can be judged, if so
    # what is not the algorithm's, whatever the gradient is: a name and a line for each
    wrong: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    texts: str = ""  # what reward functions were given that was not drawn; "" if nothing
    # that the tokens were drawn at, as `generate` was handed it; None where it was not asked
    temperature: float | None = None
    # of several processes, a number for the state of the generator before each draw
    random: list[int] = dataclasses.field(default_factory=list)
    ranks: Ranks = ALONE  # this process among those that train together
    # the gradient of the library's own loss alone, where a class of the script's own calls that and gives the
    # trainer something else; None where it is not known
    part: Gradient | None = None
    # gives a block in which the model takes a row by itself
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    passes: Sequence[Pass] = ()  # of the loss, with the weights of their tokens; none where these cannot be read
    unknown: str = ""  # why a gradient that is right for these rows is not held; "" if it is
    # of micro-batches, where the script changes them: the library's, or its own if there is none
    losses: Sequence[float] | None = None
    believed: Sequence[str] = ()  # what was taken at its word, a line each


@dataclasses.dataclass
class _Batch:
    """One generation with its rewards."""

    rows: list[Row] = dataclasses.field(default_factory=list)  # its completions
    step: int = 0  # optimizer steps that were done before it
    problems: list[str] = dataclasses.field(default_factory=list)  # why it cannot be judged
    # pairs of what was drawn and what reward functions were given instead
    texts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    temperature: float | None = None  # that `generate` was handed; None where it was not asked
    random: int = 0  # of several processes, the state of the generator before the draw; 0 where it is not known
    # what is wrong with what was drawn, as in Evidence
    wrong: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    slices: int = 0  # micro-batches that have trained on it
    # places of the rows that have been trained on in this iteration
    used: set[int] = dataclasses.field(default_factory=set)
    # places of the rows that this optimizer step trains on, with their micro-batches
    trained: dict[int, int] = dataclasses.field(default_factory=dict)


class Recorder(Listener):
    """Listens to a trainer from `attach` to `detach`.

    Args:
        trainer: of an algorithm that there is a definition of.
        wanted: says of an optimizer step, counted from 1, whether it is to be compared.
    """

    def __init__(self, trainer: Any, wanted: Callable[[int], bool]):
        super().__init__(trainer)
        self.wanted = wanted
        self.algorithm = algorithm_of(trainer)
        self.ranks = ALONE
        self.engine: Any = None  # that steps by itself
        self._overridden = False  # whether a class of the script's own makes the loss
        self._reader = Reader(self.policy, self._micro_read, self._drawn_at, self._read_safely)
        self._forget()

    def _forget(self) -> None:
        self._forget_draws()
        self._inside = False
        self._within: list[Row] = []  # what a rollout function draws on its way to its answer
        self._not_held = ""  # why a right gradient is not held
        self._next = _Batch()  # that rewards were not asked for yet
        self.last_rows: list[Row] = []  # what was drawn, as rewards were asked for
        self._batches: list[_Batch] = []
        self._reference = self._fingerprint()
        self._forget_step()

    def _forget_step(self) -> None:
        self._micros = 0
        self._open: list[tuple[int, str]] = []  # micro-batch of each row that is none of a generation's next, and why
        self._left = 0  # rows of generations that no micro-batch has had
        self._micro_rows = 0  # of the last micro-batch
        self._gradient: Gradient | None = None
        self._part: Gradient | None = None
        self._losses: dict[str, list[float]] = {"library": [], "own": []}
        self.problems = []
        self._reader.passes = []

    def attach(self) -> None:
        """Begin to listen."""
        self.detach()
        self._forget()
        self.listen()
        trainer = self.trainer
        self.wrap(trainer, "training_step", self._training_step)
        self.wrap(trainer, "compute_loss", self._compute_loss)
        self._attached.enter_context(self._library_loss_heard())
        self._reader.attach(self._attached)
        self.wrap(trainer.accelerator, "clip_grad_norm_", self._clip)

    def begin(self, compare: Callable[[], None]) -> None:
        """Meet the other processes, and find an engine that steps by itself; to be called as training begins.

        Args:
            compare: is called before an engine steps, where no callback is; see `engine`.

        Raises:
            ranks.RanksApart: another process does not come, or runs something else.
        """
        # An engine has cast the weights by now.
        self._dtypes = {name: parameter.dtype for name, parameter in self.trainer.model.named_parameters()}
        told = {"the first step that is compared": self._first_wanted()}
        self.ranks = Ranks.meet(told, float(self.trainer.args.ddp_timeout))
        self.engine = engine_of(self.trainer)
        if self.engine is not None:
            self.wrap(self.engine, "step", functools.partial(self._engine_step, compare))

    def _first_wanted(self) -> int | None:
        now = self.trainer.state.global_step
        return next((step for step in range(now + 1, now + 1000) if self.wanted(step)), None)

    def _engine_step(self, compare: Callable[[], None], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.engine.is_gradient_accumulation_boundary() and self._is_wanted:
            self._safely(self._keep_gradient)
            compare()
        return method(*args, **kwargs)

    # what is listened to

    @property
    def _is_wanted(self) -> bool:
        """Whether the step that is under way is to be compared."""
        return self.wanted(self.trainer.state.global_step + 1)

    def _micro_read(self) -> dict[str, int] | None:
        """Return the numbers of process, step and micro-batch, of a step that is compared."""
        if not (self._listens and self._is_wanted):
            return None
        return {"rank": self.ranks.number, "step": self.trainer.state.global_step, "micro": self._micros}

    def _drawn_at(self) -> float:
        known = self._batches[-1].temperature if self._batches else None
        return known or float(self.algorithm.options(self.trainer).temperature)

    def _read_safely(self, work: Callable[..., None], *args: Any) -> None:
        """Read weights; without them a wrong gradient has no name."""
        if attempt(work, *args):
            self._reader.passes = []

    @property
    def _listens(self) -> bool:
        """Whether what is called belongs to the trainer's step: no evaluation, and no measurement of this package."""
        return self._inside and not is_unseen()

    def listen_to_rewards(self) -> None:
        """Begin to listen to what is paid, also where a method of the script's own makes other rewards of it."""
        super().listen_to_rewards()
        if self.overrides(("_calculate_rewards",)) and not several() and not self.is_paired:
            self.wrap(self.trainer, "_calculate_rewards", self._calculated)

    def _calculated(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Look at the rewards that a script's own `_calculate_rewards` makes of what the functions gave."""
        known = len(self._batches)
        output = method(*args, **kwargs)
        if self._listens and len(self._batches) == known + 1:
            self._safely(self._compare_rewards, output)
        return output

    def _compare_rewards(self, rewards: Any) -> None:
        """Hold rewards, (completions, functions), against those that the functions gave."""
        batch = self._batches[-1]
        own, other = reward_table(batch.rows), torch.as_tensor(rewards).cpu().double()
        if own.shape == other.shape and not torch.allclose(own, other, rtol=1e-5, atol=1e-6, equal_nan=True):
            kind = type(self.trainer).__name__
            batch.problems.append(f"{kind}._calculate_rewards makes other rewards than the functions gave")

    def take_rollouts(self, output: dict[str, Any], by_hand: bool) -> None:
        """Take what a rollout function returned; its mask is looked at beside what it was seen to draw."""
        drawn, self._within = self._within * (not by_hand), []
        prompts, completions = output["prompt_ids"], output["completion_ids"]
        width = max(map(len, prompts), default=0), max(map(len, completions), default=0)
        ends, none, closing = self.ends(), [None] * len(prompts), self.ends() | {pad_id(self.trainer)}
        masks, scores = output.get("env_mask") or none, output.get("logprobs") or none
        every, odd, counted = list[turns.Judged](), 0, 0
        returned = [(*map(int, prompt), *map(int, own)) for prompt, own in zip(prompts, completions)]
        astray = [draw for draw in drawn if not any(turns.begins(ids, draw.prompt) for ids in returned)]
        for prompt, completion, mask, logps in zip(prompts, completions, masks, scores, strict=True):
            ids = tuple(int(token) for token in completion)  # of several turns: the last id says how it ended
            told = [1] * len(ids) if mask is None else mask  # 1: the policy's own token, 0: the environment's
            row = Row(tuple(map(int, prompt)), ids, bool(ids) and ids[-1] in ends, padded=width)
            judged = turns.judge(row, told, drawn, closing, astray)
            odd, counted = odd + (len(told) != len(ids)), counted + sum(map(bool, told))
            if judged.row.engine_logps is None and logps is not None and len(logps) == len(ids):
                judged = dataclasses.replace(judged, row=dataclasses.replace(judged.row, engine_logps=logps_of(logps)))
            every.append(judged)
        foreign, moved, masked = (sum(getattr(each, name) for each in every) for name in ("foreign", "moved", "masked"))
        if moved:
            said = f"{moved} of {counted} tokens trained on stand behind other ids than they were drawn behind"
            self._next.wrong.append((turns.RENDERED, said))
        if foreign or masked or odd:
            said = f"env_mask has another length than the completion, of {odd} completions; " * bool(odd)
            said += f"of {counted} tokens trained on {foreign} were not drawn behind what stands before them"
            self._next.wrong.append((turns.MASK, f"{said}, and {masked} that were drawn are not trained on"))
        if not all(each.seen for each in every):
            said = "what drew the completions that rollout_func returned was not seen"
            self._not_held = f"{said}, so which of their tokens are the policy's is not known"
        self._drawn += [each.row for each in every]

    def take_draws(self, drawing: Any, rows: list[Row], temperature: float | None) -> None:
        """Take what one call drew; within a rollout function, what its answer is held against."""
        self._next.temperature = temperature
        (self._within if self._rolls_out else self._drawn).extend(rows)

    def before_draw(self) -> None:
        """Note the state of the generator, which must be another one on each rank."""
        if several() and not self._next.random:
            self._next.random = _random_state(self.trainer.model)

    def _training_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._inside = True
        known = len(self._batches)
        try:
            result = method(*args, **kwargs)
        finally:
            self._inside = False
        if self.is_paired:  # it calls no compute_loss
            self._safely(self._record_micro, None, known)
        self._safely(self._keep_old, known)
        return result

    def _compute_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        known = len(self._batches)
        result = method(*args, **kwargs)
        if self._listens and torch.is_grad_enabled():
            self._note_loss("own", result)
            self._safely(self._record_micro, kwargs.get("inputs", args[1] if len(args) > 1 else None), known)
        return result

    def _library_loss_heard(self) -> contextlib.AbstractContextManager[Any]:
        """Listen to the library's loss of this trainer, inside, where a class of the script's own overrides it."""
        kinds = type(self.trainer).__mro__
        name = "_compute_loss" if hasattr(self.trainer, "_compute_loss") else "compute_loss"
        library = next(kind for kind in kinds if name in vars(kind) and kind.__module__.partition(".")[0] in LIBRARIES)
        own = kinds[: kinds.index(library)]
        self._overridden = any(each in vars(kind) for kind in own for each in ("compute_loss", "_compute_loss"))
        if not self._overridden:
            return contextlib.nullcontext()
        method = vars(library)[name]

        @functools.wraps(method)
        def listened(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            loss = method(trainer, *args, **kwargs)
            if trainer is self.trainer and self._listens and isinstance(loss, torch.Tensor) and loss.requires_grad:
                self._note_loss("library", loss)
                if several():
                    return loss
                with contextlib.suppress(RuntimeError):  # reentrant checkpoints allow no pass for chosen tensors
                    self._keep_part(loss)
            return loss

        return mock.patch.object(library, name, listened)

    def _note_loss(self, of: str, loss: Any) -> None:
        if self._overridden and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses[of].append(float(loss.detach()))

    def _keep_part(self, loss: torch.Tensor) -> None:
        """Add a loss's own gradient to the part, with the weight that the backward pass will give to that loss."""
        if not self._is_wanted:
            return
        trained = {name: each for name, each in self.trainer.model.named_parameters() if each.requires_grad}
        found = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        part = self._part = self._part or {name: torch.zeros_like(each).float() for name, each in trained.items()}

        def weigh(weight: torch.Tensor) -> None:
            for name, gradient in zip(trained, found):
                part[name] += 0 if gradient is None else weight * gradient

        loss.register_hook(weigh)

    def _record_micro(self, inputs: Any, known: int) -> None:
        """Find the rows that a micro-batch trains on, by the ids that compute_loss was given.

        Each row of a generation is used once before any is used again. What is no such row leaves a place open.
        """
        # The ledger finds them by what the model read in the loss's forward passes, for it tells what was read. That
        # would not do here: a row that the loss leaves out, or whose advantage is 0, counts where the loss is divided
        # and is in no gradient, and of a compiled model no pass is read.
        micro, self._micros = self._micros, self._micros + 1
        ids = _ids_of(inputs)
        self._micro_rows = len(ids or ())
        if ids is None:  # completions are drawn where they are trained on: the micro-batch is what came of it
            for batch in self._batches[known:]:
                batch.trained = dict.fromkeys(range(len(batch.rows)), micro)
            return
        where: dict[tuple[Ids, Ids], list[tuple[_Batch, int]]] = {}
        for batch in reversed(self._batches):
            for place, row in enumerate(batch.rows):
                where.setdefault((row.prompt, row.completion), []).append((batch, place))
        elsewhere = {completion for _, completion in where}
        for prompt, completion in ids:
            lengths = range(len(completion), -1, -1)  # it may be padded behind its end
            places = next(filter(None, (where.get((prompt, completion[:length])) for length in lengths)), [])
            unused = [(place in batch.trained, batch, place) for batch, place in places if place not in batch.used]
            if unused:
                again, batch, place = min(unused, key=lambda row: row[0])
                batch.used.add(place)
                if again:
                    self.problems.append("the step trains on a generation in more than one iteration")
                else:
                    batch.trained[place] = micro
            else:
                is_moved = any(completion[:length] in elsewhere for length in lengths[:-1])
                self._open.append((micro, "again" if places else "moved" if is_moved else "unknown"))
        if self._batches:
            batch = self._batches[-1]
            batch.slices += 1
            if batch.slices % self._slices == 0:  # an iteration is over
                self._left += len(batch.rows) - len(batch.used)
                if batch.slices < self._slices * getattr(self.trainer.args, "num_iterations", 1):
                    batch.used.clear()

    @property
    def _slices(self) -> int:
        """How many micro-batches a generation is cut into; trl 0.17 has no option that says so."""
        asked = getattr(self.trainer.args, "steps_per_generation", None)
        rows = len(self._batches[-1].rows) if self._batches and self._micro_rows else 0
        return asked or max(1, rows // max(1, self._micro_rows))

    def _clip(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.engine is None and self._is_wanted:
            self._safely(self._keep_gradient)
        return method(*args, **kwargs)

    def _keep_gradient(self) -> None:
        self._gradient = self._own_gradient()

    def _own_gradient(self) -> Gradient:
        return self._unscaled(full_gradient(self.trainer))

    def _unscaled(self, gradient: Gradient) -> Gradient:
        scale = loss_scale(self.trainer)
        return gradient if scale == 1 else {name: grad / scale for name, grad in gradient.items()}

    # what is made of it

    def take_rewards(self, asked: RewardCalls, drawn: list[Row], places: list[int | None]) -> None:
        """Put generation and rewards together."""
        count, number = len(asked.table[0]), len(self._batches)
        batch, self._next = self._next, _Batch()
        batch.step = self.trainer.state.global_step
        if any(len(values) != count for values in asked.table):
            batch.problems.append("the reward functions returned different numbers of rewards")
        if None in places:
            said = "the completions that reward functions were given are not those that were drawn"
            batch.problems += self.problems or [said]  # what was not recorded is the reason
        if batch.problems:
            self._batches.append(batch)
            return
        ids, linked = asked.given("completion_ids"), list[Row]()
        for place, row in enumerate(drawn[place] for place in places if place is not None):
            own = tuple(ids[place]) if len(ids) == count != len(drawn) else row.completion
            if row.completion != own and turns.goes_on(row, own):  # several turns are joined
                row = dataclasses.replace(row, completion=own, ended=own[-1] in self.ends())
                row = turns.with_draws(row, drawn)
            in_padding = not row.ended and row.completion[-1:] == (pad_id(self.trainer),)
            linked.append(dataclasses.replace(row, ends_in_padding=in_padding))
        drawn = self.last_rows = turns.pad_alike(linked)
        groups, problem = [0] * count, ""  # of several processes they are told when all rows are there
        if not several():
            prompts = [*asked.given("prompts")]
            if len(prompts) != count or self.scores_itself:
                prompts = [row.prompt for row in drawn]
            groups, problem = group_in_order(self._by_prompt(prompts), group_size(self.trainer))
            if problem and self._mixes(prompts):
                batch.wrong.append((MIXED, f"{problem}: rewards of different prompts are compared with each other"))
                problem = "an advantage is defined among completions of one prompt"
        batch.problems += [problem] * bool(problem)
        batch.texts = self._other_texts(drawn, asked.given("completions"))
        batch.rows = [
            dataclasses.replace(row, rewards=rewards, group=group, batch=number, micro=None)
            for row, rewards, group in zip(self._by_prompt(drawn), self._by_prompt([*zip(*asked.table)]), groups)
        ]
        self._batches.append(batch)

    def _mixes(self, prompts: Sequence[Any]) -> bool:
        """Whether no group has a prompt twice, where trl's own code compares `group_size` completions in their order.

        A rollout function may have given the prompts other words, and code of one's own may group otherwise.
        """
        size = group_size(self.trainer)
        if size < 2 or self.is_paired or self.scores_itself or self.rolls_out:
            return False
        groups = [list(map(str, prompts[place : place + size])) for place in range(0, len(prompts), size)]
        return all(len(set(group)) == size for group in groups)

    def _by_prompt(self, values: list[T]) -> list[T]:
        """Return values of completions in the order of the prompts: trainers of pairs have all first ones first."""
        if not self.is_paired:
            return values
        half = len(values) // 2
        return [value for pair in zip(values[:half], values[half:]) for value in pair]

    def _keep_old(self, known: int) -> None:
        """Keep the log-probabilities of new rows where a later step that is to be compared trains on them again."""
        args = self.trainer.args
        steps = math.ceil(count_uses(args) / max(1, args.gradient_accumulation_steps))
        now = self.trainer.state.global_step + 1
        used_again = steps > 1 and any(self.wanted(step) for step in range(now + 1, now + steps + 1))
        penalized = self.algorithm.options(self.trainer).kl_in_reward and (used_again or self.wanted(now))
        if not used_again and not penalized:
            return
        model, given = self.trainer.model, (pad_id(self.trainer), own_precision(self.trainer))
        with whole(self.ranks, model, getattr(self.trainer, "ref_model", None) if penalized else None):
            for batch in [each for each in self._batches[known:] if each.rows]:
                temperature = batch.temperature or float(args.temperature)
                scored = score_old(model, batch.rows, temperature, *given)
                if penalized:
                    with reference_of(self.trainer)() as reference:
                        scored = with_kl(scored, score_old(reference, batch.rows, temperature, *given))
                batch.rows = scored if used_again else [dataclasses.replace(row, old_logps=None) for row in scored]

    def evidence(self) -> Evidence:
        """Return what is known of the step that ends now; to be asked before the optimizer steps.

        Of several processes one that fails here must not leave the others waiting, so it has no evidence.
        """
        try:
            return self._evidence()
        except Exception as error:
            if raises_own(error):
                raise
            return Evidence([], {}, [f"no evidence: {type(error).__name__}: {error}"], ranks=self.ranks)

    def _evidence(self) -> Evidence:
        # an engine clips within its step
        wrong = self._compare_given(self._gradient) if self._gradient and self.engine is None else []
        gradient = self._gradient or self._own_gradient()
        problems = list(self.problems)
        if loss_scale(self.trainer) != 1 and not all(bool(grad.isfinite().all()) for grad in gradient.values()):
            problems.append("the scaled gradient is too large for 16 bits, so that the optimizer leaves this step out")
        wrong += self._cast()
        if not self._batches:
            problems.append("no reward function was asked, or no tokens were drawn")
        if not self._micros:
            problems.append("the trainer's training_step did not call compute_loss")
        broken = [problem for batch in self._concerned() for problem in batch.problems]
        wrong += dict.fromkeys(each for batch in self._concerned() for each in batch.wrong)
        problems += broken
        if not broken:  # else which rows are trained on is not known
            self._fill_open(problems, wrong)
        batches = [batch for batch in self._batches if batch.trained]
        rows = [
            dataclasses.replace(row, micro=batch.trained.get(place))
            for batch in batches
            for place, row in enumerate(batch.rows)
        ]
        if _ambiguous(rows, getattr(self.trainer.args, "loss_type", None) in _BY_MICRO_BATCH):
            problems.append(
                "rows of the same tokens got different rewards, and which of them is trained on is not known"
            )
        now = self.trainer.state.global_step
        if any(row.old_logps is None for batch in batches if batch.step != now for row in batch.rows):
            problems.append("the completions are of an earlier step, whose policy was not recorded")
        if self._reference != self._fingerprint() and not getattr(self.trainer.args, "sync_ref_model", False):
            wrong.append(("reference model", "the reference model's weights are no longer those of the start"))
        texts, said = [pair for batch in batches for pair in batch.texts], ""
        if texts:
            said = (
                f"the reward functions were given other texts than were drawn, for {len(texts)} of {len(rows)} "
                f"completions: drawn {texts[0][0][:60]!r}, given {texts[0][1][:60]!r}"
            )
        temperatures = {batch.temperature for batch in batches}
        if len(temperatures) > 1:
            problems.append("the step trains on generations that were drawn at several temperatures")
        return Evidence(
            rows,
            gradient,
            problems,
            wrong,
            texts=said,
            temperature=next(iter(temperatures), None),
            random=[batch.random for batch in batches],
            ranks=self.ranks,
            part=self._part and self._unscaled(self._part),
            passes=self._reader.passes,
            unknown=self._not_held,
            losses=self._losses["library"] or self._losses["own"] if self._overridden else None,
        )

    def next_step(self) -> None:
        """Forget this step; generations that later steps train on again are kept."""
        self._forget_step()
        for batch in self._batches:
            batch.trained = {}
            if batch.step < self._batches[-1].step:
                batch.rows = []

    def _cast(self) -> list[tuple[str, str]]:
        """Return whether weights that are trained were cast to other numbers since the beginning."""
        trained = {name: each for name, each in self.trainer.model.named_parameters() if each.requires_grad}
        other = [name for name, each in trained.items() if self._dtypes.get(name, each.dtype) != each.dtype]
        if not other:
            return []
        kinds = f"{self._dtypes[other[0]]} at the beginning, and are {trained[other[0]].dtype} now"
        said = f"{len(other)} of {len(trained)} tensors that are trained were {kinds} ({other[0]} first)"
        return [("weights cast to other numbers", said)]

    def _concerned(self) -> list[_Batch]:
        """Return the generations that this step trains on, or should."""
        now = self.trainer.state.global_step
        return [batch for batch in self._batches if batch.trained or batch.step == now] or self._batches[-1:]

    def _fill_open(self, problems: list[str], wrong: list[tuple[str, str]]) -> None:
        """Give rows of a generation that this step should have trained on to the micro-batches that had others.

        Which those are is known where all of the generation belongs to this step.
        """
        batches, whys = self._concerned(), [why for _, why in self._open]
        left = [(batch, place) for batch in batches for place in range(len(batch.rows)) if place not in batch.trained]
        if self._micros == self._slices * len(batches) and len(left) >= len(self._open):
            for (batch, place), micro in zip(left, [*(micro for micro, _ in self._open), *[0] * len(left)]):
                batch.trained[place] = micro
        elif count := whys.count("again"):
            said = f"{count} completions are trained on again before others of their generation are trained on"
            wrong.append(("completions trained on twice", said))
        elif count := whys.count("moved"):
            said = f"{count} completions are trained on behind other prompts than they were drawn behind"
            wrong.append(("completions of other prompts", said))
            problems.append("completions are not those of their prompts")
        elif whys:
            problems.append("the trainer trains on tokens that are not those that were drawn, on a part of them")
        elif self._left:
            wrong.append(("completions left out", f"{self._left} completions of a generation are never trained on"))

    def _compare_given(self, gradient: Gradient) -> list[tuple[str, str]]:
        """Return what is wrong with the gradient that the optimizer is given, beside that before it was clipped."""
        most, size = self.trainer.args.max_grad_norm, norm(gradient)
        if not most or not size or not math.isfinite(size):
            return []
        apart, right = measure_apart(full_gradient(self.trainer, copy=False), gradient), min(1.0, most / size)
        if apart.cosine > 1 - COSINE and abs(apart.size / right - 1) < SIZE:
            return []
        said = f"the optimizer is given another gradient than the clipped one: {apart} where {right:.3g} is right"
        return [("gradient after clipping", said)]

    def _fingerprint(self) -> list[int]:
        """Return a number for each tensor of the reference model: the sum of its bits."""
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        if getattr(trainer, "ref_model", None) is not None:
            tensors = list(trainer.ref_model.parameters())
        else:
            own = model.named_parameters() if getattr(model, "peft_config", None) else ()
            tensors = [parameter for name, parameter in own if ".ref." in name]
        return fingerprint(tensors)


def _random_state(model: nn.Module) -> int:
    """Return a number for the state of the generator that tokens are drawn by."""
    device = next(model.parameters()).device
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()
    return digest(state.numpy().tobytes())


def _ambiguous(rows: Sequence[Row], by_micro_batch: bool) -> bool:
    """Whether a row that is trained on has the tokens of one that is not, and another reward.

    By micro-batch also where both are trained on, in two of these.
    """
    seen: dict[tuple[Ids, Ids], list[Row]] = {}
    for row in rows:
        seen.setdefault((row.prompt, row.completion), []).append(row)
    return any(
        len({row.micro if by_micro_batch else row.micro is None for row in same}) > 1
        and len({(row.batch, row.group, row.rewards) for row in same}) > 1
        for same in seen.values()
    )


def _ids_of(inputs: Any) -> list[tuple[Ids, Ids]] | None:
    """Return prompts and completions that compute_loss was given; None where it was given the dataset's rows."""
    if not isinstance(inputs, dict) or "prompt_ids" not in inputs or "completion_ids" not in inputs:
        return None
    mask = inputs.get("prompt_mask")
    mask = torch.ones_like(inputs["prompt_ids"]) if mask is None else mask
    prompts = [tuple(row[kept.bool()].tolist()) for row, kept in zip(inputs["prompt_ids"], mask)]
    return list(zip(prompts, (tuple(row) for row in inputs["completion_ids"].tolist())))


def reference_of(trainer: Any) -> Reference:
    """Return what gives the reference model for a block: the trainer's own, else the policy without its adapters.

    In this order trl asks for it too: 0.14 keeps a copy of a policy that came with its adapter.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)

    @contextlib.contextmanager
    def reference() -> Iterator[nn.Module]:
        if getattr(trainer, "ref_model", None) is not None:
            yield trainer.accelerator.unwrap_model(trainer.ref_model)
        elif getattr(model, "peft_config", None):
            with without_adapters(model):
                yield model
        else:
            raise ValueError("beta is not 0, and the trainer has no reference model")

    return reference


def precisions(trainer: Any) -> set[str]:
    """Return the narrow numbers that are computed in: the arguments may not know of the launcher's."""
    return {name for name in ("bf16", "fp16") if getattr(trainer.args, name, False)} | {
        str(getattr(trainer.accelerator, "mixed_precision", "no"))
    }


def own_precision(trainer: Any) -> Precision | None:
    """Return the numbers that the trainer computes in; None where they are float32."""
    narrow = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in trainer.model.parameters())
    autocast = torch.bfloat16 if "bf16" in precisions(trainer) else None
    if "fp16" in precisions(trainer) and getattr(trainer.accelerator, "native_amp", False):  # accelerate: not on a CPU
        autocast = torch.float16
    return Precision(False, autocast, padded=True, scale=loss_scale(trainer)) if narrow or autocast else None


def loss_scale(trainer: Any) -> float:
    """Return what the loss is multiplied with before the backward pass, for numbers of 16 bits."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0
