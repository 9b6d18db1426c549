"""The rules: one TOML file for each cause in `failures/rules`, and what becomes of a run's figures by them.

A rule is a list of observations for a cause and against it. Each has predicates over figures, all of which must hold. A
figure that no file gives leaves an observation out: it counts neither way. A cause is named only where an observation
proves it: an error's text, a figure that is the failure itself, or what was measured on the run's own objects. Weights
only order what is suspected.
"""

import dataclasses
import functools
import pathlib

from failurelab import failures
from failurelab.errors import FailureLabError
from failurelab.failures import predicates
from failurelab.failures.predicates import Value
from failurelab.failures.toml_table import Table

FOLDER = pathlib.Path(failures.__file__).parent / "rules"
_OWN_WORDS = ("F10", "F14")  # whose files say what it means that preflight found nothing
_MEMORY_ALONE = ("F3a",)  # costs memory, and harms no training: possible, and never named for a bad curve
SUSPECTED, HELD, FOUND = 4, 9, 10  # what preflight saw of the script weighs so much, for a cause and against it
GUARD = 15  # what a guard saw of the run itself
ERROR = 25  # an error's text in the log, which nothing outweighs


class RuleError(FailureLabError):
    """A rule's file is not as it must be."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """Something that speaks for a cause, or against it.

    Attributes:
        weight: that it adds or takes off, where suspects are put in order.
        when: all must hold.
        says: what was observed; `{figure}` is replaced.
        why: what it means.
        from_step: the figure that says from which step on, if any.
        proves: the failures of which it proves that the run has one; empty if it proves none. Completions that are all
            cut prove F11, F12 or F13, which have the same figures.
    """

    weight: int
    when: tuple[predicates.Predicate, ...]
    says: str
    why: str
    from_step: str = ""
    proves: tuple[str, ...] = ()

    def holds(self, figures: dict[str, Value]) -> bool:
        """Return whether all its predicates hold; not where a figure is absent, or cannot be compared."""
        try:
            return all(predicate.holds(figures) for predicate in self.when)
        except (predicates.PredicateError, TypeError):
            return False


@dataclasses.dataclass(frozen=True)
class Rule:
    """What speaks for and against one cause; one that keeps the reward flat is never named where the reward rises."""

    cause: str
    title: str
    probe: str
    pro: tuple[Observation, ...]
    contra: tuple[Observation, ...]
    repair: str = ""
    keeps_reward_flat: bool = False


@dataclasses.dataclass
class Cause:
    """A cause as it stands for one run.

    Attributes:
        named: the failures of which the run has one for certain, this one first; empty where it is only suspected.
    """

    failure: str
    title: str
    weight: int
    pro: list[str]
    contra: list[str]
    probe: str
    from_step: float | None = None
    repair: str = ""
    named: tuple[str, ...] = ()


_RISES = Observation(
    5,
    predicates.parse_all(["reward_course == 'rises'"]),
    "the reward rises, from {reward_begin:.3g} to {reward_end:.3g}",
    "with this cause it would not: it is not named, whatever speaks for it",
)


@functools.cache
def load() -> tuple[list[Rule], list[Observation]]:
    """Return the rules, and what shows that something is wrong, whatever the cause.

    A failure without a file of its own has the observations that all have: its text in a log, and preflight's answer.

    Raises:
        RuleError: a file is not as it must be.
    """
    tables = {path.stem: Table.read(path, RuleError) for path in sorted(FOLDER.glob("*.toml"))}
    signs = tables.pop("signs")
    observed = [_observation(table) for table in signs.tables("sign")]
    signs.done()
    rules = [_rule(failure.id, failure, tables.pop(failure.id, None)) for failure in failures.all()]
    return rules + [_rule(cause, None, table) for cause, table in tables.items()], observed


def _rule(cause: str, failure: failures.Failure | None, raw: Table | None) -> Rule:
    """Return the rule of a cause: of a failure of the registry, of a file, or of both."""
    pro, contra = _observe_texts(cause) if failure else ([], [])
    if raw is None:
        assert failure is not None  # a cause has a file of rules, or is of the registry
        return Rule(cause, failure.title, "failurelab preflight SCRIPT", (*pro,), (*contra,), failure.fix)
    if raw.text("cause") != cause:
        raise RuleError(f"{raw.file}: its cause must be {cause!r}, as the file is called")
    rule = Rule(
        cause,
        raw.text("title", failure.title if failure else None),
        raw.text("probe"),
        (*pro, *(_observation(table) for table in raw.tables("for"))),
        (*contra, *(_observation(table) for table in raw.tables("against"))),
        raw.text("repair", failure.fix if failure else ""),
        raw.take("keeps_reward_flat", bool, False),
    )
    raw.done()
    return rule


def _observation(raw: Table) -> Observation:
    try:
        when = predicates.parse_all(raw.take("when", list))
    except predicates.PredicateError as error:
        raise RuleError(f"{raw.file}: {raw.where}when: {error}") from error
    observation = Observation(
        raw.take("weight", int, 1),
        when,
        raw.text("says"),
        raw.text("why", ""),
        raw.text("from_step", ""),
        raw.texts("proves", ()),
    )
    raw.done()
    return observation


def _observe_texts(cause: str) -> tuple[list[Observation], list[Observation]]:
    """Return what speaks for and against every failure: its text in a log, and what preflight saw of the script."""

    def observe(kind: str, weight: int, says: str, why: str, proves: bool, from_step: str = "") -> Observation:
        when = predicates.parse_all([f"{kind}_{cause} ~ '.'"])
        return Observation(weight, when, f"{says}{{{kind}_{cause}}}", why, from_step, (cause,) if proves else ())

    measured = cause not in _MEMORY_ALONE
    pro = [
        observe("error", ERROR, "its error, ", "the log has the error of this failure", True),
        observe("notice", 1, "a text that other runs print too, ", "alone it says little", False),
        observe("guard_found", GUARD, "", "a guard measured it in the run itself", measured),
        observe(
            "preflight_found", FOUND if measured else 1, "preflight: ", "named by preflight", measured, "first_step"
        ),
        observe("preflight_suspected", SUSPECTED, "preflight suspects it: ", "measured, and not undone", False),
    ]
    held = [] if cause in _OWN_WORDS else [observe("preflight_held", HELD, "preflight: ", "held by preflight", False)]
    return pro, held


def judge(figures: dict[str, Value]) -> tuple[list[Cause], list[str]]:
    """Return the causes that something speaks for, those that are named first, and the signs of a fault."""
    rules, signs = load()
    causes = []
    for rule in rules:
        pro = sorted((part for part in rule.pro if part.holds(figures)), key=lambda part: -part.weight)
        contra = [part for part in rule.contra if part.holds(figures)]
        rises = rule.keeps_reward_flat and _RISES.holds(figures)
        contra += [_RISES] if rises else []
        weight = sum(part.weight for part in pro) - sum(part.weight for part in contra)
        if not pro or weight <= 0:
            continue
        begins = [figures.get(part.from_step) for part in pro if part.from_step]
        causes.append(
            Cause(
                rule.cause,
                rule.title,
                weight,
                [_say(part, figures) for part in pro],
                [_say(part, figures) for part in contra],
                rule.probe,
                next((begin for begin in begins if isinstance(begin, int | float)), None),
                rule.repair,
                () if rises else next((part.proves for part in pro if part.proves), ()),
            )
        )
    causes.sort(key=lambda cause: (not cause.named, -cause.weight))  # stable: otherwise in the order of ids
    certain = {failure for cause in causes if len(cause.named) == 1 for failure in cause.named}
    for cause in causes:
        if len(cause.named) > 1 and certain & set(cause.named):
            cause.named = ()  # which one it is, another file says
    causes.sort(key=lambda cause: (not cause.named, -cause.weight))
    return causes, [_say(sign, figures) for sign in signs if sign.holds(figures)]


def _say(part: Observation, figures: dict[str, Value]) -> str:
    try:
        return predicates.fill(part.says, figures)
    except predicates.PredicateError:
        return part.says


def explain() -> str:
    """Return the rules as text."""
    rules, signs = load()
    lines = ["A cause is named where a line with ! holds. The others order what is suspected.", ""]
    lines.append("SIGNS that something is wrong, whatever the cause")
    for sign in signs:
        lines += [f"      {' and '.join(map(str, sign.when))}", f"          {sign.why or sign.says}"]
    for rule in rules:
        lines += ["", f"{rule.cause} {rule.title}"]
        lines += ["  never named where the reward rises"] * rule.keeps_reward_flat
        for symbol, parts in (("+", rule.pro), ("-", rule.contra)):
            for part in parts:
                lines.append(f"  {'!' if part.proves else symbol}{part.weight:<3} {' and '.join(map(str, part.when))}")
                lines.append(f"          {part.why or part.says}")
        lines.append(f"  probe: {rule.probe}")
    return "\n".join(lines)
