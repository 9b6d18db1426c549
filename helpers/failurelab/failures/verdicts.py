"""The verdict on a failure, by the registry's mechanisms over measured figures: the one place where it is made.

A mechanism that is not there proves nothing by itself: the run may not have been able to show it, and the measurement
may not have been able to see it. So HELD asks for more than a figure in its band: the stimulus excited the mechanism
(`needs`), and the same measurement saw it when it was planted (`control`). What is not known is never HELD.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from failurelab.failures.loader import Failure, Mechanism
from failurelab.failures.predicates import Predicate, Value, fields, fill

FOUND, HELD, NOT_CHECKED, NOT_APPLICABLE = "FOUND", "HELD", "NOT CHECKED", "NOT APPLICABLE"
NO_PLANT = "none: "  # so a mechanism's control begins that cannot be planted, and why: it is never held
Figures = Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What the figures say of a failure, or of one of its mechanisms.

    Attributes:
        verdict: one of the four.
        mechanism: of which it is told; empty where it is of all.
        says: what was found, in a sentence; empty where nothing was.
        missing: what would have to be known, or to be otherwise, for a verdict; empty where there is one.
    """

    verdict: str
    mechanism: str = ""
    says: str = ""
    missing: str = ""


def judge(failure: Failure, places: Iterable[Figures], controls: Mapping[str, Figures] | None = None) -> Judgement:
    """Return the verdict on a failure.

    FOUND: a mechanism was found at any place. HELD: every mechanism that applies was excited at some place, was found
    at none, and its control was seen. NOT APPLICABLE: no mechanism applies anywhere. Else NOT CHECKED.

    Args:
        failure: of the registry.
        places: the figures of each place that was measured, of which any may excite a mechanism: steps, batches, ranks.
            What stands for itself, such as each reward function, is judged by itself. A figure that is absent, None or
            NaN is unknown.
        controls: the figures that the same measurement gave with a mistake planted, by the control's name; figures
            that are not in it are the run's own.
    """
    places = list(places)
    each = [_judge_mechanism(mechanism, places, controls or {}) for mechanism in failure.mechanisms]
    for verdict in (FOUND, NOT_CHECKED):
        if first := next((judgement for judgement in each if judgement.verdict == verdict), None):
            return first
    return Judgement(HELD if any(judgement.verdict == HELD for judgement in each) else NOT_APPLICABLE)


def _judge_mechanism(mechanism: Mechanism, places: list[Figures], controls: Mapping[str, Figures]) -> Judgement:
    missing, held, name, control = "no figure was measured", False, mechanism.name, mechanism.control
    applying = [figures for figures in places if holds(mechanism.applies, figures) is not False]
    for figures in applying:
        found = holds(mechanism.found, figures)
        if found:
            return Judgement(FOUND, name, say(mechanism, figures))
        if unmet := _unmet((*mechanism.applies, *mechanism.needs), figures):
            missing = unmet
        elif found is None:
            missing = _unmet(mechanism.found, figures)
        elif control.startswith(NO_PLANT):
            missing = f"nothing can be planted ({control})"
        elif control not in controls:
            missing = f"no control was planted ({control})"
        elif not holds(mechanism.found, {**figures, **controls[control]}):
            missing = f"with the control planted ({control}) the figures look the same"
        else:
            held = True
    if places and not applying:
        return Judgement(NOT_APPLICABLE, name)
    return Judgement(HELD, name) if held else Judgement(NOT_CHECKED, name, missing=missing)


def say(mechanism: Mechanism, figures: Figures) -> str:
    """Return what a mechanism says of figures; of those that are unknown, that they were not measured."""
    return fill(mechanism.says, dict.fromkeys(fields(mechanism.says)) | dict(figures))


def holds(predicates: Iterable[Predicate], figures: Figures) -> bool | None:
    """Return whether all predicates hold: False where one does not, else None, unknown, where one is."""
    values = [_value(predicate, figures) for predicate in predicates]
    return False if False in values else None if None in values else True


def _value(predicate: Predicate, figures: Figures) -> bool | None:
    return predicate.holds(dict.fromkeys(predicate.names) | dict(figures))


def _unmet(predicates: Iterable[Predicate], figures: Figures) -> str:
    """Return the first predicate that does not hold, or is unknown, in words; empty where all hold."""
    for predicate in predicates:
        if (value := _value(predicate, figures)) is not True:
            unknown = [name for name in predicate.names if _is_unknown(figures.get(name))]
            return f"{' and '.join(unknown)} not measured" if value is None else f"it needs {predicate}"
    return ""


def _is_unknown(value: Value) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
