"""A guard for rewards that leave nothing to learn from: groups without variance, None, NaN, a column that is missing.

    trainer.add_callback(guards.RewardGuard(trainer))

GRPO's advantage is a completion's reward less the mean of its group. Where all rewards of a group are equal every
advantage is 0, and so are loss and gradient. The causes look alike in every log and ask for opposite cures. Where all
completions of a prompt are the same text, nothing was drawn. Else the guard asks each function by itself about made-up
completions, by the code that preflight asks with (`failurelab.rewards`), in a fork: right and wrong answers in the
forms that the prompt shows and that the function's own patterns look for. What these get is what can be got.

Upstream: TRL #3452 and #3857 (equal rewards), #4501 and #2771 (a reward that never sees what it needs).
"""

import collections
import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from failurelab.guards.base import Action, Guard
from failurelab.handles import is_async, listen_to, without_listeners
from failurelab.rewards import RewardTable, figures, forms, signature
from failurelab.rewards.examination import RAISES, Examination
from failurelab.rewards.inputs import OWN, Inputs, form_of
from failurelab.rewards.judging import examine
from failurelab.rewards.survey import tabulate

CAUSES = {
    "same": "all completions of a prompt are the same text, so there is nothing to compare: look for top_k=1, "
    "do_sample=False, a temperature near 0, or one seed for every draw; a model that is sure of its answer needs "
    "harder prompts",
    "weight": "what tells completions apart has a weight of 0 in reward_weights: give it one above 0",
    "constant": "a function gives the same whatever it is asked: look whether it reads the completion, and whether it "
    "compares what it should (a number is never equal to a text); or no made-up completion has the form that it pays",
    "cut": "every completion ends at max_completion_length, and one that goes on would get more: raise the limit, or "
    "ask for shorter answers",
    "floor": "no completion gets what a better one would: use easier prompts, give credit for parts of an answer, "
    "train on examples first, or look whether the function reads the answer where the model writes it",
    "mixed": "each prompt's completions get all the most, or all less: use prompts that the model solves now and then",
    "ceiling": "every completion gets the most that any made-up one gets, and a worse one would get less: use harder "
    "prompts",
    "unknown": "which of the causes it is could not be told",
}
_ROWS = 2  # prompts of the batch that made-up completions are written for
_SECONDS = 20.0  # after which a function is asked no more: some call a service, or run what a model wrote


@dataclasses.dataclass(frozen=True)
class FunctionReport:
    """What one reward function gave to completions, and to made-up ones.

    Attributes:
        name: of the function: `reward_funcs[1] length_reward`.
        weight: that its rewards are multiplied by.
        cause: one of CAUSES where its rewards were equal in each of the last groups; else empty.
        given: the lowest and the highest reward of the last groups' completions.
        made_up: the lowest and the highest reward of the made-up completions; empty where it could not be asked.
        asked: how many made-up completions there were.
        raised: to how many of these it answered with an error.
        error: the first of these errors, and the completion; or why it could not be asked at all.
        left_out: its arguments with a default of None that no column gives.
    """

    name: str
    weight: float
    cause: str = ""
    given: tuple[float, ...] = ()
    made_up: tuple[float, ...] = ()
    asked: int = 0
    raised: int = 0
    error: str = ""
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.name} gives {figures.span(self.given)}"
        if not self.cause:
            return f"{text}, which differ"
        if self.made_up:
            text += (
                f", and {figures.span(self.made_up)} to {self.asked - self.raised} made-up completions ({self.cause})"
            )
        else:
            text += ", and could not be asked about other completions"
        if self.raised:
            text += f"; to {self.raised} of {self.asked} it raises an error: {self.error}"
        elif self.error:
            text += f": {self.error}"
        return text + (f"; no column is named {', '.join(self.left_out)}" if self.left_out else "")


@dataclasses.dataclass(frozen=True)
class RewardReport:
    """What the reward functions gave, until the guard tripped or training ended.

    Attributes:
        groups: of completions of one prompt that were seen.
        flat: of these, groups whose rewards were all equal.
        cause: one of CAUSES where the last groups were all flat, else empty.
        problem: what was wrong beside; empty if nothing.
        functions: each by itself, where they were asked.
        table: what each paid for the completions that were made up; None where none was asked.
    """

    groups: int = 0
    flat: int = 0
    cause: str = ""
    problem: str = ""
    functions: tuple[FunctionReport, ...] = ()
    table: RewardTable | None = None


@dataclasses.dataclass(frozen=True)
class _Group:
    """The completions of one prompt: rewards in all and by each function, texts, and whether all are cut."""

    totals: tuple[float, ...]
    by_function: tuple[tuple[float | None, ...], ...]
    texts: tuple[str, ...]
    cut: bool


class RewardGuard(Guard):
    """Warn or stop when rewards leave nothing to learn from.

    It listens to the trainer's reward functions during training. Runs in which a part of the groups is flat are
    healthy: only `groups` flat ones in a row are told, once. Then each function is asked about some hundred made-up
    completions, once in a run, in a fork that is ended after 20 seconds: the run's own function keeps its state, and
    one that needs the GPU there cannot be asked. None is asked whose answers are awaited, or that reads the trainer's
    environments. A function that asks for the reference
    answers, and gives right ones no more than wrong ones, is told also where the others' rewards differ. What a reward
    model gives is not seen, nor rewards that differ and are given to the wrong completions. `report`, a `RewardReport`,
    is there after the first batch.

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
        self._examined: dict[int, Examination | str] = {}  # of the functions that were asked; else why one was not
        self._judged = False  # whether flat groups were told of

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
        self._functions = list(map(without_listeners, functions))  # what is asked here, no other guard listens to
        self._names = [signature.key_of(self._functions, place) for place in range(len(self._functions))]
        before, after = (functools.partial(self._check, own) for own in (self._check_columns, self._check_rewards))
        self._listening.enter_context(listen_to(functions, before, after))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening."""
        if self._functions and self.report.groups and not (self.report.cause or self.report.problem):
            self._held(
                f"{self.report.flat} of {self.report.groups} groups had equal rewards, so there was variance; whether "
                "right answers get more than wrong ones was not asked"
            )
        super().on_train_end(args, state, control)

    def _check_columns(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _by_name(self._functions[index], args, kwargs)
        missing = [each.name for each in _not_given(self._functions[index], given) if each.default is each.empty]
        if missing:
            self._tell(
                "columns",
                f"{self._names[index]} asks for {', '.join(missing)}, which never arrives; it is given "
                f"{', '.join(given)}. A reward function is given the dataset's columns by their names",
            )

    def _check_rewards(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], rewards: Any) -> None:
        kwargs = _by_name(self._functions[index], args, kwargs)
        values = [None if reward is None else float(reward) for reward in rewards]
        wrong = [value for value in values if value is not None and not math.isfinite(value)]
        if wrong:
            name = self._names[index]
            self._tell("numbers", f"{name} gives {wrong[0]} for {len(wrong)} of {len(values)} completions")
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
        weights = signature.weights_of(self._trainer(), len(self._functions))
        totals = [
            sum(weight * value for weight, value in zip(weights, row) if value is not None) for row in zip(*columns)
        ]
        self._check_groups(kwargs, totals, columns)

    def _check_groups(
        self, kwargs: dict[str, Any], totals: Sequence[float], columns: Sequence[Sequence[float | None]]
    ) -> None:
        groups = self._read_groups(kwargs, totals, columns)
        self._recent.extend(groups)
        self.report = dataclasses.replace(
            self.report,
            groups=self.report.groups + len(groups),
            flat=self.report.flat + sum(_is_flat(group.totals) for group in groups),
        )
        if len(self._recent) < self.groups or self._judged:
            return
        if not all(_is_flat(group.totals) for group in self._recent):
            self._check_each(kwargs)
            return
        self._judged = True
        rewards = [value for group in self._recent for value in group.totals]
        self.report = dataclasses.replace(self.report, cause="unknown")
        self._check(self._find_cause, kwargs)  # an error there does not hide that they are flat
        cause, functions = self.report.cause, self.report.functions
        told = f". {'; '.join(map(str, functions))}" if functions else ""
        self._tell(
            "flat",
            f"the rewards of each of the last {self.groups} groups are equal ({figures.span(rewards)}): every "
            f"advantage is 0, and so is the gradient. {cause}: {CAUSES[cause]}{told}",
        )

    def _read_groups(
        self, kwargs: dict[str, Any], totals: Sequence[float], columns: Sequence[Sequence[float | None]]
    ) -> list[_Group]:
        """Return the groups of a batch: completions of one prompt after another; one alone is no group."""
        prompts, texts = kwargs.get("prompts") or [], list(map(_text, kwargs["completions"]))
        if len(prompts) != len(totals):
            return []
        starts = _starts(prompts)
        cut = self._find_cut(kwargs, texts)
        return [
            _Group(
                tuple(totals[start:end]),
                tuple(tuple(column[start:end]) for column in columns),
                tuple(texts[start:end]),
                all(cut[start:end]),
            )
            for start, end in zip(starts, [*starts[1:], len(prompts)])
            if end - start > 1
        ]

    def _find_cut(self, kwargs: dict[str, Any], texts: Sequence[str]) -> list[bool]:
        """Return which completions have as many tokens as there may be."""
        trainer = self._trainer()
        limit = getattr(trainer, "max_completion_length", None)
        ids = kwargs.get("completion_ids") or self._encode(texts)
        if not limit or ids is None:
            return [False] * len(texts)
        return [len(each) >= limit for each in ids]

    def _encode(self, texts: Sequence[str]) -> list[list[int]] | None:
        processor = getattr(self._trainer(), "processing_class", None)
        tokenizer = getattr(processor, "tokenizer", processor)
        return None if tokenizer is None else tokenizer(list(texts), add_special_tokens=False)["input_ids"]

    def _check_each(self, kwargs: dict[str, Any]) -> None:
        """Tell of a function that gives right answers no more than wrong ones, where the others' rewards differ."""
        flat = [
            index
            for index in range(len(self._functions))
            if index not in self._examined and all(_is_flat(group.by_function[index]) for group in self._recent)
        ]
        for index in flat:
            if self._reference(kwargs, self._functions[index]) is None:
                continue
            report = self._ask(kwargs, index)
            if report.cause == "constant":
                self.report = dataclasses.replace(self.report, functions=(*self.report.functions, report))
                self._warn(f"{report}, while the other rewards differ: {CAUSES['constant']}")

    def _find_cause(self, kwargs: dict[str, Any]) -> None:
        """Find which cause it is, and what each function says of it."""
        cause, functions = self._compare_answers(kwargs)
        examined = [x for _, x in sorted(self._examined.items()) if isinstance(x, Examination)]
        table = tabulate(examined) if examined else None
        self.report = dataclasses.replace(self.report, cause=cause, functions=functions, table=table)

    def _compare_answers(self, kwargs: dict[str, Any]) -> tuple[str, tuple[FunctionReport, ...]]:
        if all(len(set(group.texts)) == 1 for group in self._recent):
            return "same", ()
        functions = tuple(self._ask(kwargs, index) for index in range(len(self._functions)))
        weighted = [report for report in functions if report.weight]
        if any(not report.cause for report in functions):  # its rewards differ, and the sum does not
            return "weight" if all(report.cause for report in weighted) else "unknown", functions
        causes = {report.cause for report in weighted}
        judges_answers = [
            report
            for report, function in zip(functions, self._functions)
            if report.weight and self._reference(kwargs, function) is not None
        ]
        if causes == {"constant"} or any(report.cause == "constant" for report in judges_answers):
            return "constant", functions
        if causes & {"floor", "mixed"} and all(group.cut for group in self._recent):
            return "cut", functions
        found = [cause for cause in ("floor", "mixed", "unknown", "ceiling") if cause in causes]
        return next(iter(found), "unknown"), functions

    def _ask(self, kwargs: dict[str, Any], index: int) -> FunctionReport:
        """Ask one function about made-up completions, and compare with what it gave to all of the last groups."""
        function, paid = self._functions[index], [group.by_function[index] for group in self._recent]
        weight = signature.weights_of(self._trainer(), len(self._functions))[index]
        given = [value for rewards in paid for value in rewards if value is not None]
        left_out = tuple(each.name for each in _not_given(function, kwargs) if each.default is None)
        report = FunctionReport(self._names[index], weight, "unknown", _range(given), left_out=left_out)
        if not all(map(_is_flat, paid)):
            return dataclasses.replace(report, cause="")
        if not given:
            return report
        if index not in self._examined:
            self._examined[index] = "to ask it failed"  # where it does, it is not asked again
            self._examined[index] = self._examine(kwargs, index)
        x = self._examined[index]
        if isinstance(x, str):
            return dataclasses.replace(report, error=x)
        raised = [each for each, value in x.paid.items() if value == RAISES]
        report = dataclasses.replace(report, asked=len(x.paid), raised=len(raised), error=x.error)
        rewards = [value for value in x.rewards if value is not None]
        if not rewards or len(raised) > len(x.paid) / 2:
            return report
        best, high = max(rewards), max(given)
        if not x.varies and (min(given) < high or high in rewards):
            cause = "constant"
        elif high > best:
            cause = "unknown"  # what it gives at most, no made-up completion shows
        elif high < best:
            cause = "floor"
        else:
            cause = "mixed" if min(given) < best else "ceiling"
        return dataclasses.replace(report, cause=cause, made_up=_range(rewards))

    def _examine(self, kwargs: dict[str, Any], index: int) -> Examination | str:
        """Call one function about made-up completions, in a fork; return why not, where it cannot be asked."""
        function = self._functions[index]
        if is_async(function):
            return "its answers are awaited"
        if "environments" in kwargs and signature.asks_for(function, "environments"):
            return "it reads the environments, and not the completions"
        if drawn := [name for name in _drawn_with_completions(kwargs) if signature.asks_for(function, name)]:
            return f"it reads {' and '.join(drawn)}, which comes with the completions that are drawn"
        rows = _rows(kwargs)
        columns = [name for name in rows[0] if name != "prompt"]
        more = {name: value for name, value in kwargs.items() if name not in columns}
        inputs = Inputs(rows, columns, more, encode=self._encode, form=form_of(kwargs["completions"][0]))
        asked = [name for each in self._functions if _is_function(each) for name in signature.asked_columns(each)]
        completions = forms.make(rows, signature.reference_column(rows, asked), [function])
        x = Examination(function, self._names[index], inputs, completions, seconds=_SECONDS)
        list(examine(x))
        return x.unasked or x

    def _reference(self, kwargs: dict[str, Any], function: Callable[..., Any]) -> str | None:
        """Return the column with the reference answers, if a function asks for it."""
        asked = signature.asked_columns(function)
        column = signature.reference_column(_rows(kwargs), asked)
        return column if column in asked else None

    def _tell(self, kind: str, message: str) -> None:
        """Trip once for each kind of thing found."""
        if kind not in self._told:
            self._told.add(kind)
            if kind != "flat":
                self.report = dataclasses.replace(self.report, problem=message)
            self._trip(message, self.report, ("F10",) if kind == "flat" else ("F14",))


def _is_function(function: Any) -> bool:
    return callable(function) and not isinstance(function, torch.nn.Module)


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by their names."""
    known = signature.parameters(function, follow_wrapped=False)
    names = [each.name for each in known if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return dict(zip(names, args)) | kwargs


def _not_given(function: Callable[..., Any], given: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Return the parameters that a call leaves out. A decorator's own count: it may give the others by itself."""
    known = (each for each in signature.parameters(function, follow_wrapped=False) if each.name not in given)
    return [each for each in known if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _rows(kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the first prompts of a batch: the prompt, and the columns that reach the functions."""
    prompts = kwargs["prompts"]
    columns = {
        name: column
        for name, column in kwargs.items()
        if name not in (*OWN, "environments") and isinstance(column, (list, tuple)) and len(column) == len(prompts)
    }
    return [
        {"prompt": prompts[place], **{name: column[place] for name, column in columns.items()}}
        for place in _starts(prompts)[:_ROWS]
    ]


def _drawn_with_completions(kwargs: Mapping[str, Any]) -> list[str]:
    """Return the lists that differ among completions of one prompt: a `rollout_func` made them, and no dataset."""
    prompts, plain = kwargs["prompts"], (str, int, float, type(None))

    def differs(column: Sequence[Any], place: int) -> bool:
        one, other = column[place - 1 : place + 1]
        return isinstance(one, plain) and isinstance(other, plain) and one != other

    same = [place for place in range(1, len(prompts)) if prompts[place] == prompts[place - 1]]
    lists = {name: each for name, each in kwargs.items() if name not in OWN and isinstance(each, (list, tuple))}
    columns = {name: each for name, each in lists.items() if len(each) == len(prompts)}
    return [name for name, column in columns.items() if any(differs(column, place) for place in same)]


def _starts(prompts: Sequence[Any]) -> list[int]:
    """Return the places at which another prompt begins."""
    return [place for place in range(len(prompts)) if not place or prompts[place] != prompts[place - 1]]


def _is_flat(values: Sequence[float | None]) -> bool:
    return len(set(values)) == 1


def _range(values: Sequence[float]) -> tuple[float, ...]:
    return (min(values), max(values)) if values else ()


def _text(completion: Any) -> str:
    """Return a completion's text: of a conversation, the last message's."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content", ""))
