"""One reward function, what it is asked about, and what it paid."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from failurelab_preflight.finding import Finding
from failurelab_preflight.repairs import Repair
from failurelab_preflight.rewards import figures, signature
from failurelab_preflight.rewards.asking import Asker, Reply
from failurelab_preflight.rewards.forms import Completion
from failurelab_preflight.rewards.inputs import Inputs

RAISES = "raises"


@dataclasses.dataclass(eq=False)
class Examination:
    """A reward function, and what it paid.

    Attributes:
        function: as it was given to the trainer.
        key: of it: `reward_funcs[1] length_reward`.
        inputs: what it is called with.
        completions: made up; those that it raises for are taken out when it was asked.
        column: with the references; empty where there is none.
        opened: what the prompt has written of a completion already.
        weight: its entry in reward_weights.
        alone: whether it is the only one.
        masked: whether the trainer leaves None and NaN out of the sum.
        turned: what turns the sign of its weight.
        part: completions of one call in training, where that is less than a group; else 0.
        rewards: for each completion; empty where it could not be asked, or gave no numbers.
        paid: the same of all completions that were made up, by completion; RAISES where it raised.
        changed: the arguments that it changes in place.
    """

    function: Callable[..., Any]
    key: str
    inputs: Inputs
    completions: list[Completion]
    column: str = ""
    opened: str = ""
    weight: float = 1.0
    alone: bool = True
    masked: bool = True
    turned: Repair | None = None
    part: int = 0
    rewards: list[float | None] = dataclasses.field(default_factory=list)
    paid: dict[Completion, float | str | None] = dataclasses.field(default_factory=dict)
    changed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.asked = signature.asked_columns(self.function)
        self.asks_reference = bool(self.column) and self.column in self.asked
        self.wanted = [each.name for each in signature.parameters(self.function)]
        self._asker = Asker(self.function)

    @property
    def varies(self) -> bool:
        """Whether it pays differently for completions of one prompt."""
        return bool(self.rewards) and not figures.is_flat(self.completions, self.rewards)

    def compare(self, values: figures.Rewards, some: Sequence[Completion] | None = None) -> figures.Pairs:
        """Return `figures.compare_pairs` of its own completions, or of some; by a negative weight less is more."""
        return figures.compare_pairs(self.completions if some is None else some, values, -1 if self.weight < 0 else 1)

    def ask(
        self, some: Sequence[Completion] | None = None, prepare: Callable[[], Any] | None = None, **options: Any
    ) -> Reply:
        """Call it in a process of its own, once, or as often as calls of `part` take.

        Args:
            some: completions; by default all of its own.
            prepare: changes something first, in that process alone.
            options: of `Inputs.make`.
        """
        asked = self.completions if some is None else some

        def make(places: Sequence[int]) -> dict[str, Any]:
            return self.inputs.make([asked[place] for place in places], wanted=self.wanted, **options)

        return self._asker.ask(make, len(asked), prepare, self.part)

    def tells(self, some: Sequence[Completion] | None = None, is_right: bool = False, **options: Any) -> str:
        """Return what it pays when asked so, if it tells completions of a prompt apart; else nothing.

        With `is_right` it must pay right answers more.
        """
        some = self.completions if some is None else some
        reply = self.ask(some, **options)
        values, left = reply.values, [n for n in range(len(some)) if n not in reply.raised]
        more, less = self.compare(values, some)
        if more and not less:
            return f"a right answer gets {more[0][0]:g} and a wrong one {more[0][1]:g}"
        apart = len(values) == len(some) and not figures.is_flat([some[n] for n in left], [values[n] for n in left])
        return f"it gives {figures.span(values)}" if apart and not is_right else ""

    @property
    def place(self) -> str:
        """Its place among the trainer's functions, as a part of the script: a name may change with the repair."""
        return self.key.partition(" ")[0]

    def found(
        self, fault: str, evidence: str, repair: str, tried: str = "", failure: str = "F14", **more: Any
    ) -> Finding:
        """Return what was found of it, which may have several faults of one failure."""
        return Finding(failure, evidence, repair, tried=tried, part=self.place, fault=fault, **more)

    def suspected(self, fault: str, evidence: str, repair: str, why: str, failure: str = "F14") -> Finding:
        """Return what was found of it, and why that is no proof."""
        return Finding.suspected(failure, evidence, why, repair, part=self.place, fault=fault)

    def not_checked(self, why: str, failure: str = "F14") -> Finding:
        """Return that something of it could not be judged."""
        return Finding.not_checked(failure, why, part=self.place)
