"""A guard for rewards that leave nothing to learn from: equal ones, and such as are no numbers.

    trainer.add_callback(guards.RewardGuard(trainer))

GRPO's advantage is a completion's reward less the mean of its group. Where all rewards of a group are equal every
advantage is 0, and so are loss and gradient. The guard looks at the rewards that are really paid, and asks no function
by itself: why they are equal, `failurelab preflight` tells, which asks about completions whose worth is known.

Upstream: TRL #3452 and #3857 (equal rewards), #4501 (a reward that never sees what it needs).
"""

import collections
import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from failurelab import plants
from failurelab.guards.base import Action, Guard
from failurelab.handles import listen_to
from failurelab.measure import counts

_SAME_TEXT = (
    "all completions of a prompt are the same text, so there is nothing to compare: look for top_k=1, do_sample=False, "
    "a temperature near 0, or one seed for every draw"
)
_ASK = (
    "failurelab preflight asks each function about right and wrong completions: do the prompts need to be easier, or "
    "harder, or does a function not see what it needs?"
)


@dataclasses.dataclass(frozen=True)
class RewardReport:
    """What the reward functions paid, until the guard tripped or training ended.

    Attributes:
        groups: of completions of one prompt that were seen.
        flat: of these, groups whose rewards were all equal.
        constant: functions that paid one number to every completion of the last groups: a form that all have, or what
            the function looks for never arrives.
        problem: what was found; empty if nothing.
    """

    groups: int = 0
    flat: int = 0
    constant: tuple[str, ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class _Group:
    """The completions of one prompt: their rewards in all and by each function, and their texts."""

    totals: tuple[float, ...]
    by_function: tuple[tuple[float | None, ...], ...]
    texts: tuple[str, ...]


class RewardGuard(Guard):
    """Warn or stop when rewards leave nothing to learn from.

    It listens to the trainer's reward functions during training. Runs in which a part of the groups is flat are
    healthy: only `groups` flat ones in a row are told, once. A reward that is no finite number, and a completion that
    no function rewards, are told at once. What a reward model gives is not seen, nor rewards that differ and are given
    to the wrong completions. `report`, a `RewardReport`, is there after the first batch.

    Args:
        trainer: the trainer that it is added to; callbacks are not given it.
        action: `warn` issues a GuardWarning, `stop` raises GuardTripped.
        groups: flat groups in a row, of at least two completions each, that are told.
    """

    failures = ("F10", "F14")

    def __init__(self, trainer: Any, action: Action = "warn", *, groups: int = 16):
        super().__init__(action)
        if groups < 1:
            raise ValueError(f"groups={groups}: at least one group must be seen before its rewards can be judged")
        self.groups = groups
        self._trainer = weakref.ref(trainer)
        self._functions: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self._batch: dict[int, list[float | None]] = {}
        self._recent: collections.deque[_Group] = collections.deque(maxlen=self.groups)
        self._told: set[str] = set()
        self._seen: dict[str, int] = {}  # figures of all batches, added up

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start to listen to the reward functions."""
        self._stop()
        self._forget()
        self.report = RewardReport()
        functions = getattr(self._trainer(), "reward_funcs", None)
        if not isinstance(functions, list) or not any(map(_is_function, functions)):
            self._could_not_check("the trainer has no reward functions of yours (a reward model is not listened to)")
            return
        self._functions = list(functions)
        after = functools.partial(self._check, self._check_rewards)
        self._listening.enter_context(listen_to(functions, after))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening."""
        if self._functions and self.report.groups and not self.report.problem:
            constant = (
                f"; {', '.join(self.report.constant)} paid every completion alike" if self.report.constant else ""
            )
            self._conclude(
                f"{self.report.flat} of {self.report.groups} groups had equal rewards; whether right answers get more "
                f"than wrong ones was not asked{constant}",
                [self._seen],
                {
                    "equal rewards": plants.equal_rewards([group.totals for group in self._recent]),
                    "equal completions": plants.equal_completions([group.texts for group in self._recent]),
                },
                ("F10",),
            )
        super().on_train_end(args, state, control)

    def _check_rewards(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], rewards: Any) -> None:
        kwargs = _by_name(self._functions[index], args, kwargs)
        values = [None if reward is None else float(reward) for reward in rewards]
        numbers = [value for value in values if value is not None]
        if self._finds("F14", counts.of_rewards([numbers])):
            wrong = [value for value in numbers if not math.isfinite(value)]
            self._tell(
                "F14",
                f"{key_of(self._functions, index)} gives {wrong[0]} for {len(wrong)} of {len(values)} completions",
            )
        self._batch[index] = values
        observed = [number for number, each in enumerate(self._functions) if _is_function(each)]
        if set(self._batch) != set(observed):
            return
        batch, self._batch = self._batch, {}
        columns = [batch[number] for number in observed]
        best = [max((value for value in row if value is not None), default=None) for row in zip(*columns)]
        if self._finds("F14", counts.of_rewards([best])) and (empty := best.count(None)):
            self._tell("F14", f"no function gives a reward for {empty} of {len(values)} completions: all say None")
        if len(observed) < len(self._functions):
            return  # a reward model adds to the sum, and is not seen
        weights = weights_of(self._trainer(), len(self._functions))
        totals = [
            sum(weight * value for weight, value in zip(weights, row) if value is not None) for row in zip(*columns)
        ]
        self._check_groups(kwargs, totals, columns)

    def _check_groups(
        self, kwargs: dict[str, Any], totals: Sequence[float], columns: Sequence[Sequence[float | None]]
    ) -> None:
        groups = _read_groups(kwargs, totals, columns)
        self._recent.extend(groups)
        seen = counts.of_rewards([group.totals for group in groups])
        seen |= counts.of_draws([group.texts for group in groups])
        self._seen = {name: self._seen.get(name, 0) + count for name, count in seen.items()}
        self.report = dataclasses.replace(self.report, groups=self._seen["groups"], flat=self._seen["flat_groups"])
        if len(self._recent) < self.groups:
            return
        constant = [place for place in range(len(self._functions)) if len(set(self._paid(place))) == 1]
        self.report = dataclasses.replace(
            self.report, constant=tuple(key_of(self._functions, place) for place in constant)
        )
        if judged := self._finds("F10", counts.of_rewards([group.totals for group in self._recent])):
            self._tell("F10", self._describe_flat(judged.says))

    def _describe_flat(self, said: str) -> str:
        paid = "; ".join(
            f"{key_of(self._functions, place)} gives {_span(self._paid(place))}"
            for place in range(len(self._functions))
        )
        why = _SAME_TEXT if all(len(set(group.texts)) == 1 for group in self._recent) else _ASK
        return f"{said}, one after the other: every advantage is 0, and so is the gradient. {paid}. Next: {why}"

    def _paid(self, place: int) -> list[float | None]:
        return [value for group in self._recent for value in group.by_function[place]]

    def _tell(self, failure: str, message: str) -> None:
        """Trip once for each failure that is found."""
        if failure not in self._told:
            self._told.add(failure)
            self.report = dataclasses.replace(self.report, problem=message)
            self._trip(message, self.report, (failure,))


def key_of(functions: Sequence[Any], place: int) -> str:
    """Return the stable key of a reward function: `reward_funcs[1] length_reward`."""
    function = functions[place]
    while isinstance(function, functools.partial):
        function = function.func
    return f"reward_funcs[{place}] {getattr(function, '__name__', type(function).__name__)}"


def weights_of(trainer: Any, count: int) -> list[float]:
    """Return the weight of each reward function."""
    weights = getattr(trainer, "reward_weights", None)
    return [1.0] * count if weights is None else [float(weight) for weight in weights]


def _is_function(function: Any) -> bool:
    return callable(function) and not isinstance(function, torch.nn.Module)


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by their names."""
    known = inspect.signature(function, follow_wrapped=False).parameters.values() if args else ()
    names = [each.name for each in known if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return dict(zip(names, args)) | kwargs


def _read_groups(
    kwargs: dict[str, Any], totals: Sequence[float], columns: Sequence[Sequence[float | None]]
) -> list[_Group]:
    """Return the groups of a batch: completions of one prompt after another; one alone is no group."""
    prompts, texts = kwargs.get("prompts") or [], list(map(_text, kwargs["completions"]))
    if len(prompts) != len(totals):
        return []
    starts = [place for place in range(len(prompts)) if not place or prompts[place] != prompts[place - 1]]
    return [
        _Group(
            tuple(totals[start:end]),
            tuple(tuple(column[start:end]) for column in columns),
            tuple(texts[start:end]),
        )
        for start, end in zip(starts, [*starts[1:], len(prompts)])
        if end - start > 1
    ]


def _span(values: Sequence[float | None]) -> str:
    """Return the least and the most: `0 to 1`."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "None"
    return f"{min(numbers):g} to {max(numbers):g}" if min(numbers) < max(numbers) else f"{numbers[0]:g}"


def _text(completion: Any) -> str:
    """Return a completion's text: of a conversation, the last message's."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content", ""))
