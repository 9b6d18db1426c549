"""A guard for rewards that leave nothing to learn from: groups without variance, None, NaN, a column that is missing.

    trainer.add_callback(guards.RewardGuard(trainer))

GRPO's advantage is a completion's reward less the mean of its group. Where all rewards of a group are equal every
advantage is 0, and so are loss and gradient. Three causes look alike in every log and ask for opposite cures: all
completions are wrong (floor), all are right (ceiling), or the function gives the same number whatever it reads
(constant). The guard tells them apart by asking the function about completions of its own: an empty one, the prompt,
and the texts of the dataset's columns, where a reference answer is.

Upstream: TRL #3452 and #3857 (equal rewards), #4501 and #2771 (a reward that never sees what it needs).
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

from failurelab.guards.base import Action, Guard
from failurelab.handles import keep_random_state

CAUSES = {
    "floor": "every completion is wrong, and a better one would get more: use easier prompts, give credit for parts of "
    "an answer, train on examples first, or look whether the function reads the answer where the model writes it",
    "ceiling": "every completion is right, and a worse one would get less: use harder prompts",
    "constant": "the function gives the same whatever it is asked, also for an empty completion and for the texts of "
    "the dataset's columns: look whether it reads the completion, and whether it compares what it should",
    "mixed": "each prompt's completions are all right or all wrong: use prompts that the model solves now and then",
    "unknown": "the function could not be asked about other completions",
}


@dataclasses.dataclass(frozen=True)
class RewardReport:
    """What the reward functions gave, until the guard tripped or training ended.

    Attributes:
        groups: of completions of one prompt that were seen.
        flat: of these, groups whose rewards were all equal.
        cause: one of CAUSES where the last groups were all flat, else empty.
        rewards: of the last groups' completions, the weighted sum of all functions.
        problem: what was wrong beside; empty if nothing.
    """

    groups: int = 0
    flat: int = 0
    cause: str = ""
    rewards: tuple[float, ...] = ()
    problem: str = ""


class RewardGuard(Guard):
    """Warn or stop when rewards leave nothing to learn from.

    It listens to the trainer's reward functions during training. Runs in which a part of the groups is flat are
    healthy: only `groups` flat ones in a row are told, once. What a reward model gives is not seen. `report`, a
    `RewardReport`, is there after the first batch.

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
        self._recent: collections.deque[tuple[float, ...]] = collections.deque(maxlen=self.groups)
        self._told: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start to listen to the reward functions."""
        self._stop()
        self._forget()
        self.report = RewardReport()
        trainer = self._trainer()
        functions = getattr(trainer, "reward_funcs", None)
        if not isinstance(functions, list) or not any(map(_is_function, functions)):
            self._could_not_check("the trainer has no reward functions of yours (a reward model is not listened to)")
            return
        self._functions = list(functions)
        self._listening.callback(self._put_back)
        for index, function in enumerate(self._functions):
            if _is_function(function):
                functions[index] = self._listen(function, index)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening."""
        if self._functions and self.report.groups and not (self.report.cause or self.report.problem):
            self._held(f"{self.report.flat} of {self.report.groups} groups had equal rewards, so there was variance")
        super().on_train_end(args, state, control)

    def _put_back(self) -> None:
        trainer = self._trainer()
        if trainer is not None:
            trainer.reward_funcs[:] = self._functions
        self._functions = []

    def _listen(self, function: Callable[..., Any], index: int) -> Callable[..., Any]:
        """Return the function, listened to: what it gives is the same."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def listened(*args: Any, **kwargs: Any) -> Any:
                self._check(self._check_columns, function, kwargs)
                rewards = await function(*args, **kwargs)
                self._check(self._check_rewards, function, index, kwargs, rewards)
                return rewards

        else:

            @functools.wraps(function)
            def listened(*args: Any, **kwargs: Any) -> Any:
                self._check(self._check_columns, function, kwargs)
                rewards = function(*args, **kwargs)
                self._check(self._check_rewards, function, index, kwargs, rewards)
                return rewards

        return listened

    def _check_columns(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        missing = [name for name in named if name not in kwargs]
        if missing:
            self._tell(
                "columns",
                f"{name_of(function)} asks for {', '.join(missing)}, which never arrives; it is given "
                f"{', '.join(kwargs)}. A reward function is given the dataset's columns by their names",
            )

    def _check_rewards(self, function: Callable[..., Any], index: int, kwargs: dict[str, Any], rewards: Any) -> None:
        values = [None if reward is None else float(reward) for reward in rewards]
        wrong = [value for value in values if value is not None and not math.isfinite(value)]
        if wrong:
            self._tell("numbers", f"{name_of(function)} gives {wrong[0]} for {len(wrong)} of {len(values)} completions")
        self._batch[index] = values
        observed = [number for number, each in enumerate(self._functions) if _is_function(each)]
        if set(self._batch) != set(observed):
            return
        batch, self._batch = self._batch, {}
        columns = [batch[number] for number in observed]
        empty = sum(all(value is None for value in row) for row in zip(*columns))
        if empty:
            self._tell("none", f"no function gives a reward for {empty} of {len(values)} completions: all say None")
        if len(observed) < len(self._functions):
            return  # a reward model adds to the sum, and is not seen
        weights = reward_weights(self._trainer(), len(self._functions))
        totals = [
            sum(weight * value for weight, value in zip(weights, row) if value is not None) for row in zip(*columns)
        ]
        self._check_groups(kwargs, totals)

    def _check_groups(self, kwargs: dict[str, Any], totals: Sequence[float]) -> None:
        prompts = kwargs.get("prompts") or []
        groups = _groups(prompts, totals) if len(prompts) == len(totals) else []
        flat = sum(len(set(group)) == 1 for group in groups)
        self._recent.extend(groups)
        self.report = dataclasses.replace(
            self.report, groups=self.report.groups + len(groups), flat=self.report.flat + flat
        )
        if (
            len(self._recent) < self.groups
            or any(len(set(group)) > 1 for group in self._recent)
            or "flat" in self._told
        ):
            return
        rewards = tuple(value for group in self._recent for value in group)
        cause = "mixed" if len(set(rewards)) > 1 else self._find_cause(kwargs, rewards[0])
        self.report = dataclasses.replace(self.report, cause=cause, rewards=rewards)
        given = f"all {rewards[0]:g}" if cause != "mixed" else f"from {min(rewards):g} to {max(rewards):g}"
        self._tell(
            "flat",
            f"the rewards of each of the last {self.groups} groups are equal ({given}): every advantage is 0, and so "
            f"is the gradient. {cause}: {CAUSES[cause]}",
        )

    def _find_cause(self, kwargs: dict[str, Any], reward: float) -> str:
        """Ask the functions about other completions, and compare with the one reward that all got."""
        functions = self._functions
        if any(inspect.iscoroutinefunction(function) for function in functions):
            return "unknown"
        weights, count = reward_weights(self._trainer(), len(functions)), len(kwargs["completions"])
        texts = [[""] * count, [_text(prompt) for prompt in kwargs["prompts"]]]
        for name, column in kwargs.items():
            fits = isinstance(column, (list, tuple)) and len(column) == count
            if fits and name not in ("prompts", "completions", "completion_ids"):
                texts.append([str(value) for value in column])
        answers: list[float] = []
        with keep_random_state():
            for probe in texts:
                given = {**kwargs, "completions": [_like(old, new) for old, new in zip(kwargs["completions"], probe)]}
                rows = zip(*(function(**given) for function in functions))
                answers += [sum(w * float(v) for w, v in zip(weights, row) if v is not None) for row in rows]
        if any(answer > reward for answer in answers):
            return "floor"
        return "ceiling" if any(answer < reward for answer in answers) else "constant"

    def _tell(self, kind: str, message: str) -> None:
        """Trip once for each kind of thing found."""
        if kind not in self._told:
            self._told.add(kind)
            if kind != "flat":
                self.report = dataclasses.replace(self.report, problem=message)
            self._trip(message, self.report)


def _is_function(function: Any) -> bool:
    return callable(function) and not isinstance(function, torch.nn.Module)


def name_of(function: Callable[..., Any]) -> str:
    """Return what messages call a reward function."""
    return f"the reward function {getattr(function, '__name__', type(function).__name__)}"


def reward_weights(trainer: Any, count: int) -> list[float]:
    """Return the weight of each of a trainer's `count` reward functions."""
    weights = getattr(trainer, "reward_weights", None)
    return [1.0] * count if weights is None else [float(weight) for weight in weights]


def _groups(prompts: Sequence[Any], totals: Sequence[float]) -> list[tuple[float, ...]]:
    """Return the rewards of the completions of one prompt after another; a prompt with one completion is no group."""
    groups: list[list[float]] = []
    for index, total in enumerate(totals):
        if index and prompts[index] == prompts[index - 1]:
            groups[-1].append(total)
        else:
            groups.append([total])
    return [tuple(group) for group in groups if len(group) > 1]


def _text(prompt: Any) -> str:
    """Return a prompt's text: of a conversation, the last message's."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))


def _like(completion: Any, text: str) -> Any:
    """Return `text` in the form of a completion: a string, or a list of messages."""
    return text if isinstance(completion, str) else [{"role": "assistant", "content": text}]
