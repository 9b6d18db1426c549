"""F10 and F14: the script's own reward functions, asked about completions whose worth is known.

The functions are called as the trainer calls them: with the columns that reach them, in the form that the dataset's
prompts have. The completions are made up: the reference answer where the dataset has one, in the forms that answers are
commonly written in and in those that the function's own patterns and texts ask for; a wrong answer of the same length
in the same form; and an empty one. Each function is called once, and again only where it gave all of them the same.

A function that gives the same whatever it reads is told only where that is sure: it never reads the completions, it
works on plain text and is given messages, it works on a reference of another type, or it asks for a column that is not
there. The rest is NOT CHECKED: a form that was not thought of is no failure.

Upstream: TRL #3452, #3857 (equal rewards), #4501, #2771, PR #5775, #5902 (rewards that never see what they need).
"""

import ast
import asyncio
import contextlib
import copy
import dataclasses
import inspect
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from failurelab._text import first_line
from failurelab.guards.reward import name_of, reward_weights
from failurelab.handles import keep_random_state
from failurelab.preflight.answers import Answer, Finding, Held, NotChecked
from failurelab.preflight.inputs import Seen
from failurelab.preflight.judges import patterns
from failurelab.preflight.judges.rows import is_conversation, reference_column, sample, tokenizer_of, trl_source

ROWS, MORE_ROWS = 4, 24  # asked of at first; and before a reference is said to be one that cannot be read
_FORMS = (
    "{}",
    "The answer is {}.",
    "Answer: {}",
    "#### {}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think>Let me think.</think><answer>{}</answer>",
    "<think>\nLet me think.\n</think>\n<answer>\n{}\n</answer>",
    "<reasoning>\nLet me think.\n</reasoning>\n<answer>\n{}\n</answer>\n",
    '```json\n{{"answer": "{}"}}\n```',
)
_COLD = 0.05  # a temperature under which the likeliest token is drawn nearly always
_OTHERS = ("", "I do not know.", "The cat sat on the mat. " * 8)
# An error of these types is the function's own; another may come from a service or a package that is not there.
_OWN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, NameError, AssertionError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Probe:
    """One made-up completion: of which row, `right`, `wrong` or `other`, in which form, and its text."""

    row: int
    kind: str
    form: int
    text: str


def judge_rewards(seen: Seen) -> Iterator[Answer]:
    """Call the trainer's reward functions on made-up completions; tell what they can never reward."""
    functions = getattr(seen.trainer, "reward_funcs", None)
    if not isinstance(functions, list) or not functions:
        if any(getattr(seen.trainer, name, None) is not None for name in ("reward_model", "judge")):
            yield NotChecked("F10", "rewards come from a reward model or a judge, which is not asked")
        return
    rows = _prompted(seen, ROWS)
    if not rows:
        yield NotChecked("F10", "the dataset has no column `prompt` that could be read")
        return
    if getattr(seen.trainer, "environment_factories", None):
        yield NotChecked("F10", "rewards come from environments, which are not entered")
        return
    own = [function for function in functions if callable(function) and not isinstance(function, torch.nn.Module)]
    if len(own) < len(functions):
        yield NotChecked("F10", f"{len(functions) - len(own)} reward model(s) are not asked")
    greedy = _find_greedy_sampling(seen)
    if greedy:
        yield Finding(
            "F10",
            f"{greedy}: the completions of a prompt are all the same, and so are their rewards",
            "Sample: temperature=1.0, and neither top_k=1 nor do_sample=False.",
        )
    if own:
        yield from _Examination(seen, rows, functions, own).answers()


def _find_greedy_sampling(seen: Seen) -> str:
    """Return what in the arguments makes all completions of a prompt the same; empty if nothing does."""
    asked = {**seen.asked, **(seen.asked.get("generation_kwargs") or {})}
    temperature, top_p = asked.get("temperature"), asked.get("top_p")
    if isinstance(temperature, (int, float)) and temperature <= _COLD:
        return f"temperature is {temperature:g}"
    if isinstance(top_p, (int, float)) and top_p <= _COLD:
        return f"top_p is {top_p:g}"
    return "top_k is 1" if asked.get("top_k") == 1 else "do_sample is False" if asked.get("do_sample") is False else ""


class _Examination:
    """The functions of one trainer, and what they gave."""

    def __init__(self, seen: Seen, rows: list[dict[str, Any]], functions: list[Any], own: list[Any]) -> None:
        self.seen, self.trainer, self.rows, self.functions, self.own = seen, seen.trainer, rows, functions, own
        self.source = trl_source(seen.trainer)
        self.chat = is_conversation(rows[0]["prompt"])
        self.columns = self._reaching()
        self.asked = {id(function): _asked(function) for function in own}
        self.column = reference_column(rows, [name for names in self.asked.values() for name in names])
        self.probes = _probes(rows, self.column, own)

    def _reaching(self) -> list[str]:
        """Return the dataset's columns that a reward function is given."""
        names = [name for name in self.rows[0] if name not in ("prompt", "completion", "completion_ids")]
        if getattr(getattr(self.trainer, "args", None), "remove_unused_columns", False):
            names = [name for name in names if name in ("image", "images") and f'"{name}"' in self.source]
        return names

    def answers(self) -> Iterator[Answer]:
        columns: list[list[float | None]] = []
        constant, answers = [], []
        for function in self.own:
            rewards = self._missing(function) or self._call(function, self.probes)
            rewards = rewards if isinstance(rewards, (Finding, NotChecked)) else self._numbers(function, rewards)
            if not isinstance(rewards, list):
                answers.append(rewards)
                continue
            if finding := self._compares_by_position(function, rewards):
                answers.append(finding)
                continue
            columns.append(rewards)
            if self._flat(rewards):
                constant.append((function, rewards))
        yield from answers
        if answers:
            return
        told = False
        unread = [function for function, _ in constant if not _reads_completions(function)]
        for function, rewards in constant:
            finding = self._why(function, rewards, unread, alone=len(unread) == len(self.functions))
            if finding:
                told = True
                yield finding
        if told:
            return
        if len(constant) == len(self.own):
            given = ", ".join(f"{name_of(function)} gives {_value(rewards)}" for function, rewards in constant)
            yield NotChecked("F10", f"{given} for all {len(self.probes)} made-up completions: none may have its form")
            return
        yield from self._varying(columns, constant)

    def _varying(self, columns: list[list[float | None]], constant: list[tuple[Any, Any]]) -> Iterator[Answer]:
        totals = self._totals(columns)
        given = [f"{name_of(function)} gives {_value(rewards)}" for function, rewards in constant]
        if all(total is None for total in totals):
            yield Finding(
                "F14",
                f"no function gives a reward for any of {len(totals)} completions: all say None, which counts as 0",
                "Return a number for every completion that the function can judge.",
            )
            return
        numbers = [total or 0.0 for total in totals]
        evidence = f"{len(numbers)} made-up completions of {len(self.rows)} prompts got {min(numbers):g} to "
        if given:
            yield NotChecked(
                "F14", f"{', '.join(given)} for all {len(self.probes)} made-up completions: none may have its form"
            )
        equal = "equal" if self._flat([numbers[0]] * len(numbers)) else "different"
        yield Held("F10", f"{evidence}{max(numbers):g}", f"one number in place of them all is seen as {equal} rewards")
        yield self._sign(numbers)

    def _sign(self, totals: list[float]) -> Answer:
        if self.column is None or not any(self.column in names for names in self.asked.values()):
            low, high = min(range(len(totals)), key=totals.__getitem__), max(range(len(totals)), key=totals.__getitem__)
            return NotChecked(
                "F14",
                f"no reference to compare with, so read the direction: {totals[low]:g} for "
                f"{len(self.probes[low].text)} characters, {totals[high]:g} for {len(self.probes[high].text)}",
            )
        if len(self.own) < len(self.functions):
            return NotChecked("F14", "a reward model adds to the sum, so the sign against the reference is unknown")
        weights = dict(zip(map(id, self.functions), reward_weights(self.trainer, len(self.functions))))
        asking = [function for function in self.own if self.column in self.asked[id(function)]]
        if not any(weights[id(function)] for function in asking):
            return Finding(
                "F14",
                f"{', '.join(map(name_of, asking))} alone asks for the reference (column {self.column}), and its "
                "entry in reward_weights is 0: being right is not rewarded",
                "Give it a weight above 0; reward_weights are in the order of reward_funcs.",
            )
        given = {(probe.row, probe.kind, probe.form): total for probe, total in zip(self.probes, totals)}
        pairs = [
            (row, given[row, "right", form], given[row, "wrong", form])
            for row, kind, form in given
            if kind == "right" and (row, "wrong", form) in given
        ]
        more = [pair for pair in pairs if pair[1] > pair[2] + 1e-9]
        less = [pair for pair in pairs if pair[1] < pair[2] - 1e-9]
        if more:
            return Held(
                "F14",
                f"the right answer got {more[0][1]:g} (column {self.column})",
                f"a wrong one in the same words got {more[0][2]:g}",
            )
        if {row for row, *_ in less} == {probe.row for probe in self.probes if probe.kind == "right"} and less:
            return Finding(
                "F14",
                f"the wrong sign: in the same words the right answer (column {self.column}) gets {less[0][1]:g} and a "
                f"wrong one {less[0][2]:g}, for {len(less)} of {len(pairs)} pairs and never the other way round",
                "Turn the sign of the reward (or of its entry in reward_weights), so that right answers get more.",
            )
        return NotChecked(
            "F14",
            f"no form of the reference (column {self.column}) got more than a wrong answer; another form may",
        )

    def _totals(self, columns: list[list[float | None]]) -> list[float | None]:
        weights = reward_weights(self.trainer, len(self.functions))
        weights = [weight for weight, function in zip(weights, self.functions) if function in self.own]
        return [
            None if all(value is None for value in row) else sum(w * v for w, v in zip(weights, row) if v is not None)
            for row in zip(*columns)
        ]

    # What a function is given.

    def _missing(self, function: Callable[..., Any]) -> Finding | None:
        given = [*self._arguments([], self.columns)]
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return None
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        missing = [each.name for each in named if each.default is each.empty and each.name not in given]
        if missing:
            return Finding(
                "F14",
                f"{name_of(function)} asks for {', '.join(missing)}, which never arrives: it is given "
                f"{', '.join(given)}",
                self._columns_repair(missing[0]),
            )
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        extra = [] if takes_all else [name for name in given if name not in {each.name for each in named}]
        if extra:
            return Finding(
                "F14",
                f"{name_of(function)} takes no {', '.join(extra)}, which this trainer hands to it: a TypeError",
                "Add **kwargs to the function's arguments.",
            )
        return None

    def _columns_repair(self, name: str) -> str:
        if name in self.rows[0] and name not in self.columns and name not in ("prompt", "completion"):
            return "Set remove_unused_columns=False: the trainer drops the columns that the model does not take."
        have = ", ".join(self.columns) or "none besides prompt"
        return f"Call the dataset's column {name!r} (dataset.rename_column), or the argument as the column: {have}."

    def _arguments(self, probes: Sequence[Probe], names: Sequence[str], text: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of one call, as this release of trl makes them."""
        chat = self.chat and not text
        completions = [[{"role": "assistant", "content": p.text}] if chat else p.text for p in probes]
        arguments = {
            "prompts": [copy.deepcopy(self.rows[probe.row]["prompt"]) for probe in probes],
            "completions": completions,
        }
        if "completion_ids=completion_ids" in self.source:
            texts = [probe.text for probe in probes]
            tokenizer = tokenizer_of(self.trainer)
            arguments["completion_ids"] = (
                tokenizer(texts, add_special_tokens=False)["input_ids"] if texts and tokenizer is not None else []
            )
        arguments |= {name: [copy.deepcopy(self.rows[probe.row][name]) for probe in probes] for name in names}
        more = {"trainer_state": getattr(self.trainer, "state", None), "log_extra": _nothing, "log_metric": _nothing}
        return arguments | {name: value for name, value in more.items() if f'reward_kwargs["{name}"]' in self.source}

    def _call(self, function: Callable[..., Any], probes: Sequence[Probe]) -> Any:
        try:
            return _run(function, self._arguments(probes, self.columns))
        except KeyError as error:
            name = error.args[0] if error.args else None
            if name in self.asked[id(function)] and name not in self.columns:
                return Finding(
                    "F14",
                    f"{name_of(function)} reads the column {name!r}, which never arrives: a KeyError",
                    self._columns_repair(name),
                )
            return self._error(function, error)
        except _OWN as error:
            return self._error(function, error)
        except Exception as error:
            return _not_asked(function, error)

    def _error(self, function: Callable[..., Any], error: Exception) -> Answer:
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            return _not_asked(function, error)
        what, repair = "completions in plain words", "Let the function give its lowest reward to what it cannot read."
        if any(not probe.text for probe in self.probes) and not inspect.iscoroutinefunction(function):
            filled = [probe for probe in self.probes if probe.text]
            with contextlib.suppress(Exception):
                _run(function, self._arguments(filled, self.columns))
                what = "an empty completion, which a model makes when it ends at once"
        if self.chat and what.startswith("completions"):
            with contextlib.suppress(Exception):
                _run(function, self._arguments(self.probes, self.columns, text=True))
                what = "this dataset's completions, which are lists of messages; with plain text it does not"
                repair = 'Read the text of a completion as completion[0]["content"].'
        return Finding(
            "F14", f"{name_of(function)} raises {type(error).__name__}: {first_line(error)}, for {what}", repair
        )

    # What it gave.

    def _numbers(self, function: Callable[..., Any], given: Any) -> Answer | list[float | None]:
        count = len(self.probes)
        if isinstance(given, torch.Tensor):
            given = given.tolist()
        single = isinstance(given, (int, float)) or (hasattr(given, "__len__") and len(given) == 1)
        if single and count > 1:
            broadcast = "rewards, but " not in self.source
            return Finding(
                "F14",
                f"{name_of(function)} gives one number for {count} completions"
                + (": this trl gives it to all of them, every advantage is 0" if broadcast else ": trl refuses it"),
                "Return a list with one reward for each completion.",
            )
        try:
            given = list(given)
            values = [None if value is None else float(value) for value in given]
        except (TypeError, ValueError):
            return Finding(
                "F14",
                f"{name_of(function)} returns {type(given).__name__} {str(given)[:60]!r}, which is no list of numbers",
                "Return a list of floats.",
            )
        if len(values) != count:
            return Finding(
                "F14",
                f"{name_of(function)} gives {len(values)} rewards for {count} completions",
                "Return one reward for each completion, also for those that it cannot read.",
            )
        nothing_masked = "nansum" not in self.source
        none = sum(value is None for value in values)
        nan = sum(value is not None and math.isnan(value) for value in values)
        infinite = sum(value is not None and math.isinf(value) for value in values)
        if infinite or ((none or nan) and nothing_masked):
            what = "inf" if infinite else "NaN" if nan else "None"
            return Finding(
                "F14",
                f"{name_of(function)} gives {what} for {infinite or nan or none} of {count} completions, which makes "
                + ("an error in this trl" if what == "None" else "its group's advantages NaN, and then the weights"),
                "Return a finite number for every completion.",
            )
        return [None if value is None or math.isnan(value) else value for value in values]

    def _flat(self, rewards: Sequence[float | None], probes: Sequence[Probe] | None = None) -> bool:
        """Return whether all completions of each prompt got the same, and something."""
        groups: dict[int, set[float | None]] = {}
        for probe, reward in zip(probes or self.probes, rewards):
            groups.setdefault(probe.row, set()).add(reward)
        return all(len(group) == 1 for group in groups.values()) and any(value is not None for value in rewards)

    def _why(
        self, function: Callable[..., Any], rewards: Sequence[float | None], unread: Sequence[Any], alone: bool
    ) -> Finding | None:
        """Return what makes a function give the same to all completions of a prompt, where that is sure."""
        given = f"{name_of(function)} gives {_value(rewards)} for all {len(rewards)} made-up completions"
        if function in unread:
            evidence = f"{given}: it never reads them, so every advantage and every gradient is 0"
            return Finding("F10", evidence, "Let the reward depend on the completion.") if alone else None
        if inspect.iscoroutinefunction(function):
            return None
        if self.chat and self._varies(function, self._arguments(self.probes, self.columns, text=True)):
            return Finding(
                "F14",
                f"{given}, which are lists of messages here; the same texts as plain strings get different rewards",
                'Read the text of a completion as completion[0]["content"].',
            )
        if self._whole_batch(function):
            return Finding(
                "F10",
                f"{given}, and another number for another batch: it gives one number for a whole batch, so every "
                "advantage is 0",
                "Return each completion's own reward.",
            )
        there = self._arguments([], self.columns)
        for name in self.asked[id(function)]:
            value = None if name in there else self._find_readable_reference(function, name)
            if value is not None:
                return Finding(
                    "F14",
                    f"{given}: it asks for the column {name!r}, which never arrives; with {name}={value!r} it would "
                    "tell right from wrong",
                    self._columns_repair(name),
                )
        return self._other_reference(function, given)

    def _whole_batch(self, function: Callable[..., Any]) -> bool:
        """Ask batches of right, wrong and other completions each: is there one number in each, and not the same?"""
        batches = [[probe for probe in self.probes if probe.kind == kind] for kind in ("right", "wrong", "other")]
        given = [
            self._call_ignoring_errors(function, self._arguments(batch, self.columns))
            for batch in batches
            if len(batch) > 1
        ]
        return all(len(set(rewards)) == 1 for rewards in given) and len({rewards[0] for rewards in given}) > 1

    def _compares_by_position(self, function: Callable[..., Any], rewards: Sequence[float | None]) -> Finding | None:
        """Ask again in the reverse order: a list of the script's own is in the dataset's order, a batch is not."""
        name, column = _own_list(function, self.rows)
        if name is None:
            return None
        turned = self._call_ignoring_errors(function, self._arguments(self.probes[::-1], self.columns))[::-1]
        pairs = enumerate(zip(rewards, turned))
        first = next((place for place, pair in pairs if None not in pair and pair[0] != pair[1]), None)
        if first is None:
            return None
        return Finding(
            "F14",
            f"{name_of(function)} compares with {name}, a list of the script's own, by the place in the batch: the "
            f"same completion of the same prompt got {rewards[first]:g} in one order and {turned[first]:g} in another",
            f"Use the argument {column}: the trainer hands over its values for the prompts of the batch, which it "
            f"draws in another order than {name} has.",
        )

    def _other_reference(self, function: Callable[..., Any], given: str) -> Finding | None:
        """Ask with references that are a plain number: a function that tells those apart cannot read the dataset's."""
        column = self.column
        if column is None or column not in self.asked[id(function)]:
            return None
        value = self._find_readable_reference(function, column)
        rows, self.rows = self.rows, _prompted(self.seen, MORE_ROWS)
        try:
            more = _probes(self.rows, column, self.own)
            if value is None or self._varies(function, self._arguments(more, self.columns), more):
                return None
        finally:
            self.rows = rows
        real = rows[0][column]
        return Finding(
            "F14",
            f"{given}, the right answers among them: {column} is {type(real).__name__} {str(real)[:40]!r}, and a "
            f"reference {value!r} ({type(value).__name__}) would be told from a wrong one",
            f"Compare with what {column} holds: the same type, and a pattern that finds it.",
        )

    def _find_readable_reference(self, function: Callable[..., Any], column: str) -> Any:
        """Return a plain reference by which the function tells right completions from wrong ones; None if by none."""
        for value in ("7", 7, 7.0):
            probes = _probes([{**row, column: value} for row in self.rows], column, self.own)
            arguments = self._arguments(probes, self.columns) | {column: [value] * len(probes)}
            given = {
                (probe.row, probe.form, probe.kind): reward
                for probe, reward in zip(probes, self._call_ignoring_errors(function, arguments))
            }
            if any(
                kind == "right" and reward != given.get((row, form, "wrong"))
                for (row, form, kind), reward in given.items()
            ):
                return value
        return None

    def _varies(
        self, function: Callable[..., Any], arguments: dict[str, Any], probes: Sequence[Probe] | None = None
    ) -> bool:
        rewards = self._call_ignoring_errors(function, arguments)
        return bool(rewards) and not self._flat(rewards, probes)

    def _call_ignoring_errors(self, function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
        try:
            rewards = list(_run(function, arguments))
        except Exception:  # asked with what the dataset does not hold: what it then raises says nothing of the script
            return []
        return rewards if len(rewards) == len(arguments["completions"]) else []


def _probes(rows: Sequence[Mapping[str, Any]], column: str | None, functions: Sequence[Any]) -> list[Probe]:
    """Return the made-up completions: right and wrong in each form, and others."""
    probes = []
    for number, row in enumerate(rows):
        reference = _reference(row.get(column)) if column else ""
        if reference:
            wrong = _other(reference)
            forms = [
                *(form.format for form in _FORMS),
                *(f for each in functions for f in patterns.forms(each, reference)),
            ]
            for form, write in enumerate(forms):
                probes += [
                    Probe(number, "right", form, write(reference)),
                    Probe(number, "wrong", form, write(wrong)),
                ]
        else:
            texts = [text for each in functions for text in (form("4") for form in patterns.forms(each, "4"))]
            texts += [form.format("4") for form in _FORMS]
            probes += [Probe(number, "other", len(_OTHERS) + place, text) for place, text in enumerate(texts)]
        probes += [Probe(number, "other", -1 - place, text) for place, text in enumerate(_OTHERS)]
    return probes


def _reference(value: Any) -> str:
    """Return the answer itself: of a worked solution, what follows `####` or stands in the last box."""
    if isinstance(value, (list, tuple)) and value and not is_conversation(value):
        value = value[0]
    if is_conversation(value):
        value = value[-1].get("content", "")
    text = "" if value is None or isinstance(value, Mapping) else str(value).strip()
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return text.rpartition("####")[2].strip() if "####" in text else boxed[-1] if boxed else text


def _other(text: str) -> str:
    """Return another answer of the same length: a reward for length sees no difference."""
    shift = {**{str(d): str((d + 3) % 9 + 1) for d in range(10)}}
    for first, last in (("a", "z"), ("A", "Z")):
        letters = [chr(code) for code in range(ord(first), ord(last) + 1)]
        shift |= {letter: letters[(place + 3) % 26] for place, letter in enumerate(letters)}
    return "".join(shift.get(letter, letter) for letter in text)


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a reward function as the trainer does; what it prints is not shown, what it draws at random is put back."""
    with keep_random_state(), contextlib.redirect_stdout(io.StringIO()):
        given = function(**arguments)
        return asyncio.run(given) if inspect.iscoroutine(given) else given


def _tree(function: Callable[..., Any]) -> Any:
    """Return the syntax tree of a function; None where its source is not there, or is a part of a line."""
    function = inspect.unwrap(getattr(function, "func", function))
    if not hasattr(function, "__code__"):
        function = inspect.getattr_static(type(function), "__call__", function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    if getattr(function, "__name__", "") == "<lambda>":
        return lambdas[0] if len(lambdas) == 1 else None  # which of a line's it is, nobody knows
    return next((node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))), None)


def _asked(function: Callable[..., Any]) -> list[str]:
    """Return the columns that a function asks for: its arguments, and the keys that it takes of its **kwargs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    standard = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [each.name for each in parameters if each.kind in kinds]
    rest = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)
    tree = _tree(function)
    for node in ast.walk(tree) if tree is not None and rest else ():
        key = None
        if isinstance(node, ast.Subscript) and _is_name(node.value, rest):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            key = node.args[0] if node.args and _is_name(node.func.value, rest) else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            names.append(key.value)
    return [name for name in dict.fromkeys(names) if name not in standard]


def _own_list(function: Callable[..., Any], rows: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Return the name of a list outside of the function that holds the rows' values of a column, and the column's."""
    try:
        outside = inspect.getclosurevars(inspect.unwrap(getattr(function, "func", function)))
    except TypeError:
        return None, ""
    for name, value in {**outside.globals, **outside.nonlocals}.items():
        listed = isinstance(value, Sequence) and not isinstance(value, str)  # a column of datasets is no list
        if listed and len(value) >= len(rows) > 1:
            for column in rows[0]:
                if column != "prompt" and all(row[column] in value for row in rows):
                    return name, column
    return None, ""


def _reads_completions(function: Callable[..., Any]) -> bool:
    """Return whether a function may read a completion: counting them, or asking for their type, does not count."""
    tree = _tree(function)
    if tree is None:
        return True
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    typed = {call.args[0] for call in calls if _is_name(call.func, ("isinstance", "type"))}
    counted, unread = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_name(node.func, "len") and node.args:
            counted.add(node.args[0])
        iterated = node.generators if isinstance(node, (ast.ListComp, ast.GeneratorExp)) else ()
        for loop in (node,) if isinstance(node, ast.For) else iterated:
            target = getattr(loop.target, "id", None)
            used = [
                node
                for node in ast.walk(tree)
                if _is_name(node, target) and isinstance(node.ctx, ast.Load) and node not in typed
            ]
            if target and not used:
                unread.add(loop.iter)
    names = ("completions", "completion_ids", *_rest_name(tree))
    return any(
        _is_name(node, names) and isinstance(node.ctx, ast.Load) and node not in counted | unread
        for node in ast.walk(tree)
    )


def _rest_name(tree: Any) -> tuple[str, ...]:
    """Return the name of **kwargs where the completions can only come by it, and of a first positional argument."""
    arguments = tree.args
    named = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return () if "completions" in named or arguments.kwarg is None else (arguments.kwarg.arg,)


def _is_name(node: Any, name: Any) -> bool:
    names = name if isinstance(name, tuple) else (name,)
    return isinstance(node, ast.Name) and node.id in names


def _value(rewards: Sequence[float | None]) -> str:
    values = sorted({reward for reward in rewards if reward is not None})
    return f"{values[0]:g}" if len(values) == 1 else f"one number for each prompt ({values[0]:g} to {values[-1]:g})"


def _prompted(seen: Seen, count: int) -> list[dict[str, Any]]:
    return [row for row in sample(seen, count) if row.get("prompt")]


def _not_asked(function: Callable[..., Any], error: Exception) -> NotChecked:
    return NotChecked("F14", f"{name_of(function)} could not be asked: {type(error).__name__}: {first_line(error)}")


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for the trainer's own log: what is asked here is no part of the run."""
