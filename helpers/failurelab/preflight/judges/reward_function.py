"""One reward function of a script, asked alone about made-up completions: what it takes, gives and raises."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from packaging.version import Version

from failurelab.guards.reward import names_of, reward_weights
from failurelab.preflight.answer import Finding
from failurelab.preflight.inputs import Seen
from failurelab.preflight.judges import asking
from failurelab.preflight.judges import reward_figures as figures
from failurelab.preflight.judges.asking import Asker, Given
from failurelab.preflight.judges.reward_arguments import FORMS, Arguments
from failurelab.preflight.judges.rows import installed_version
from failurelab.preflight.repairs import AnyKeywords, FirstLine, Keyword, Repair
from failurelab.preflight.repairs import Arguments as TrainingArguments
from failurelab.reward_functions import source as reward_source
from failurelab.reward_functions.completions import Probe

_MASKED = Version("0.16")  # the first release that leaves None and NaN out of the sum


@dataclasses.dataclass(eq=False)
class RewardFunction:
    """A reward function, and what it gave.

    Attributes:
        function: as the script gave it to the trainer.
        seen: the script.
        arguments: what it is called with.
        probes: the made-up completions.
        column: with the references; empty where the dataset has none.
        opened: what the prompt has written of a completion already.
        weight: its entry in reward_weights.
        place: in the trainer's list of reward functions.
        rewards: for each probe; empty where it could not be asked, or gave no numbers.
        raises: what is said of the probes that it raises for, where it answers others.
        answered: the probes that it does not raise for.
        name: for messages; with its place where another one is called the same.
        asked: the columns that it asks for.
    """

    function: Callable[..., Any]
    seen: Seen
    arguments: Arguments
    probes: list[Probe]
    column: str
    opened: str
    weight: float
    place: int
    rewards: list[float | None] = dataclasses.field(default_factory=list)
    raises: Finding | None = None

    def __post_init__(self) -> None:
        self.name = names_of(self.seen.trainer.reward_funcs)[self.place]
        self.asked = reward_source.asked_columns(self.function)
        self.answered = self.probes
        self._asker, self._wanted = (
            Asker(self.function),
            [each.name for each in reward_source.parameters(self.function)],
        )

    @property
    def part(self) -> str:
        """Which of the reward functions it is, in a key."""
        return f"reward_funcs[{self.place}]"

    @property
    def asks_reference(self) -> bool:
        """Whether it asks for the column with the references."""
        return self.column in self.asked

    @property
    def judged_rows(self) -> set[int]:
        """The rows that it gives a number for."""
        return {probe.row for probe, value in zip(self.probes, self.rewards) if value is not None}

    @property
    def varies(self) -> bool:
        """Whether it gives different rewards to completions of one prompt."""
        return bool(self.rewards) and not figures.is_flat(self.probes, self.rewards)

    def ask(self, probes: Sequence[Probe] | None = None, **options: Any) -> Given:
        """Call it once, in a process of its own; again without the completions that it raises for, if there are others.

        Args:
            probes: other completions.
            options: of `Arguments.make` and `Asker.ask`.
        """
        call = {name: options.pop(name) for name in ("prepare", "slips") if name in options}
        probes = self.probes if probes is None else probes

        def make(places: Sequence[int]) -> dict[str, Any]:
            return self.arguments.make([probes[place] for place in places], wanted=self._wanted, **options)

        given = self._asker.ask(make(range(len(probes))), part=make, **call)
        if not given.raised:
            return given
        left = [place for place in range(len(probes)) if place not in given.raised]
        answered = self._asker.ask(make(left), **call)
        if answered.error or answered.unasked:
            return dataclasses.replace(given, raised=())
        rewards = answered.rewards
        if len(answered.values) == len(left):
            rewards = _fill(probes, dict(zip(left, answered.values)))
        return dataclasses.replace(given, rewards=rewards, error=given.error or given.unasked, unasked="")

    def compare(self, probes: Sequence[Probe] | None = None, values: figures.Rewards | None = None) -> figures.Pairs:
        """Return `compare_pairs` of what it gave, or of other values: by a negative weight less is more."""
        probes = self.probes if probes is None else probes
        return figures.compare_pairs(probes, self.rewards if values is None else values, -1 if self.weight < 0 else 1)

    def tells(self, probes: Sequence[Probe] | None = None, **options: Any) -> str:
        """Return the span of what it gives when asked so, if it tells completions of a prompt apart; else nothing."""
        probes = self.probes if probes is None else probes
        values = self.ask(probes, **options).values
        return figures.span(values) if len(values) == len(probes) and not figures.is_flat(probes, values) else ""

    def finding(self, failure: str, fault: str, evidence: str, repair: str, **more: Any) -> Finding:
        """Return a finding about this function, which may have several faults of one failure."""
        return Finding(failure, evidence, repair, part=self.part, fault=fault, **more)

    def not_checked(self, why: str, failure: str = "F14") -> Finding:
        """Return that something of this function could not be judged."""
        return Finding.not_checked(failure, why, part=self.part)

    def examine(self) -> Finding | None:
        """Call it as the trainer does; keep its rewards, or return what is wrong before any reward is compared."""
        if misfit := self._misfit():
            return misfit
        given = self.ask()
        self.answered = [probe for place, probe in enumerate(self.probes) if place not in given.raised]
        problem: Finding | None = self._error(given)
        if given.raised and not self._lacks(given.key):
            problem, self.raises = None, problem
        return problem or self._no_numbers(given)

    def _lacks(self, key: str | None) -> bool:
        """Whether a key is a column that it asks for and that never arrives."""
        return key in self.asked and key not in self.arguments.columns

    def other_form(self) -> tuple[str, str] | None:
        """Return another form of the same completions in which it tells them apart, and what it gives then."""
        for form in FORMS:
            if form != self.arguments.form and (told := self.tells(form=form)):
                return form, f"as {form} the same texts get {told}"
        return None

    def not_read(self, evidence: str, other: tuple[str, str], ends: bool = False) -> Finding:
        """Return the finding of a function that reads completions of another form (see `other_form`) than these."""
        if self.arguments.form == "plain text":
            return self.finding(
                "F14", "form", evidence, "Read a completion as the text that it is.", tried=other[1], ends=ends
            )
        line = "completions = [completion[-1]['content'] for completion in completions]"
        repair = 'Read the text of a completion as completion[0]["content"].'
        return self.finding(
            "F14", "form", evidence, repair, undo=FirstLine(self.function, line), tried=other[1], ends=ends
        )

    @property
    def turned_weight(self) -> Repair:
        """Turn the sign of its weight."""
        functions = self.seen.trainer.reward_funcs
        weights = reward_weights(self.seen.trainer, len(functions))
        turned = [-weight if place == self.place else weight for place, weight in enumerate(weights)]
        return TrainingArguments({"reward_weights": turned})

    def never_arrives(
        self, name: str, source: str | None, evidence: str, tried: str | None = None, **more: Any
    ) -> Finding:
        """Return the finding of a column that it asks for and that never arrives.

        Args:
            name: of the column.
            source: the column of the dataset that is to arrive under this name.
            evidence: what was seen.
            tried: what it gave with such a column; by default it is asked, with `source` in its place.
            more: of a Finding.
        """
        if name in self.arguments.rows[0] and name not in ("prompt", "completion", *self.arguments.columns):
            undo: Repair | None = TrainingArguments({"remove_unused_columns": False})
            repair = "Set remove_unused_columns=False: the trainer drops the columns that the model does not take."
        else:
            undo = Keyword("trainer", "train_dataset", f"{{}}.rename_column({source!r}, {name!r})")
            undo = None if source in (None, "", name) else undo
            repair = (
                f"Call the dataset's column {name!r} (dataset.rename_column), or the argument as the column: "
                f"{', '.join(self.arguments.columns) or 'none besides prompt'}."
            )
        if tried is None:
            told = source and self.tells(columns={name: lambda row: row.get(source)})
            tried = f"with {source} under this name it gives {told}" if told else ""
        return self.finding("F14", "column", evidence, repair, undo=undo, tried=tried, **more)

    def one_at_a_time(self) -> str:
        """Ask about single completions of the first prompt; return what they get, if that differs."""
        first = [probe for probe in self.answered if probe.row == self.answered[0].row]
        others, right, wrong = ([p for p in first if p.kind == kind] for kind in ("other", "right", "wrong"))
        got: dict[float, str] = {}
        for probe in [*others[-3:], *right[:16], *others[:8], *wrong[:2]]:
            given = self.ask([probe])
            values = [given.rewards] if isinstance(given.rewards, float) else given.values
            if len(values) == 1 and values[0] is not None:
                got.setdefault(values[0], probe.text)
            if len(got) > 1:
                (low, one), (high, other) = sorted(got.items())
                return f"asked one at a time, {figures.quote(one)} gets {low:g} and {figures.quote(other)} {high:g}"
        return ""

    def _misfit(self) -> Finding | None:
        missing, extra = self.arguments.missing(self.function)
        if missing:
            evidence = (
                f"{self.name} asks for {', '.join(missing)}, which never arrives: it is given "
                f"{', '.join(self.arguments.names())}. A TypeError ends the run"
            )
            source = missing[0] if missing[0] in self.arguments.rows[0] else self.column
            return self.never_arrives(missing[0], source, evidence, "" if missing[1:] else None, ends=True)
        if extra:
            given = self.ask(without=extra).values
            return self.finding(
                "F14",
                "keywords",
                f"{self.name} takes no {', '.join(extra)}, which this trainer hands to it: a TypeError ends the run",
                "Add **kwargs to the function's arguments.",
                undo=AnyKeywords(self.function),
                tried=f"called without, it gives {figures.span(given)}" if given else "",
                ends=True,
            )
        return None

    def _error(self, given: Given) -> Finding | None:
        if given.unasked:
            self.seen.not_called.add(id(self.function))
            return self.not_checked(f"{self.name} could not be asked: {given.unasked}")
        if not given.error:
            return None
        if self._lacks(given.key):
            evidence = f"{self.name} reads the column {given.key!r}, which never arrives: a KeyError ends the run"
            return self.never_arrives(given.key or "", self.column, evidence, ends=True)
        evidence, tried = f"{self.name} raises {given.error}, for", ""
        what, repair = "completions in plain words", "Let it give its lowest reward to what it cannot read."
        if given.raised:
            what, tried = self._raised_for(given.raised), f"without those it gives {figures.span(given.values)}"
        elif other := self.other_form():
            what = f"this dataset's completions, each of which is {self.arguments.form}"
            return self.not_read(f"{evidence} {what}", other, ends=True)
        return self.finding("F14", "raises", f"{evidence} {what}", repair, tried=tried, ends=True)

    def _raised_for(self, places: Sequence[int]) -> str:
        """Return what the completions at these places have in common that it raises for."""
        raised, other = ([p for n, p in enumerate(self.probes) if (n in places) is wanted] for wanted in (True, False))
        rows = {probe.row for probe in raised}
        if not any(probe.text for probe in raised):
            return "an empty completion, which a model makes when it ends at once"
        if rows.isdisjoint(probe.row for probe in other):
            row = self.arguments.rows[min(rows)]
            held = ", ".join(f"{name}={str(row[name])[:40]!r}" for name in self.asked if name in row)
            return f"every completion of {len(rows)} of {len(self.arguments.rows)} rows, such as that with {held}"
        example = next((probe for probe in raised if probe.kind == "other" and probe.text), raised[0])
        return f"{len(raised)} of {len(self.probes)} completions, such as {figures.quote(example.text)}"

    def _no_numbers(self, given: Given) -> Finding | None:
        """Keep the rewards; return what is wrong with them as numbers."""
        rewards, count = given.rewards, len(self.answered)
        if isinstance(rewards, float) or (isinstance(rewards, list) and len(rewards) == 1 < count):
            return self.finding(
                "F10",
                "one number",
                f"{self.name} gives one number for {count} completions: a trl that takes it gives it to all of them, "
                "so every advantage is 0, and later releases refuse it",
                "Return a list with one reward for each completion.",
                tried=self.one_at_a_time(),
            )
        if not isinstance(rewards, list) or len(rewards) not in (count, len(self.probes)):
            what = f"returns {rewards}, which is no list of numbers"
            if isinstance(rewards, list):
                what = f"gives {len(rewards)} rewards for {count} completions"
            repair = "Return one reward for each completion, also for those that it cannot read."
            return self.finding("F14", "count", f"{self.name} {what}", repair, ends=True)
        odd = [
            "None" if value is None else "inf" if math.isinf(value) else "NaN" * math.isnan(value)
            for place, value in enumerate(rewards)
            if place not in given.raised
        ]
        wrong = ("inf",) if installed_version("trl") >= _MASKED else ("inf", "NaN", "None")
        what = next((name for name in wrong if name in odd), "")
        if what:
            return self.finding(
                "F14",
                "no number",
                f"{self.name} gives {what} for {odd.count(what)} of {count} completions, which makes "
                + ("an error in this trl" if what == "None" else "its group's advantages NaN, and then the weights"),
                "Return a finite number for every completion.",
                ends=what == "None",
            )
        self.rewards = [None if value is None or math.isnan(value) else value for value in rewards]
        return self._second_call()

    def _second_call(self) -> Finding | None:
        """Call it twice in one process: what it keeps from call to call must not make the next one fail."""
        probes = self.answered
        first = self.arguments.make(probes, wanted=self._wanted)
        again = self.ask(probes, prepare=lambda: asking.call(self.function, first))
        if again.unasked or len(again.values) == len(probes):
            return None
        what = f"raises {again.error}" if again.error else f"gives {len(again.values)} rewards"
        evidence = f"{self.name} {what} at its second call, for {len(probes)} completions as at the first"
        repair = "Begin each call anew: no list or iterator outside of the function, or in its default arguments."
        return self.finding(
            "F14", "second call", evidence, repair, tried="a first call gives one reward for each", ends=True
        )


def _fill(probes: Sequence[Probe], given: dict[int, float | None]) -> list[float | None]:
    """Return a reward for each probe: where none was given, by place, the lowest that others of its row got."""
    lowest: dict[int, float] = {}
    for place, value in given.items():
        if value is not None:
            row = probes[place].row
            lowest[row] = min(value, lowest.get(row, value))
    return [given[place] if place in given else lowest.get(probe.row) for place, probe in enumerate(probes)]
