"""The rules: one TOML file for each cause in `failures/rules`, and what becomes of a run's figures by them.

A rule is a list of observations for a cause and against it. Each has predicates over figures, all of which must hold,
and a weight. A cause's weight is the sum. A figure that no file gives leaves an observation out: it counts neither way.
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
CONVICTS = 5  # a cause is named, and no longer only possible, from this weight on
_OWN_WORDS = ("F10", "F14")  # whose files say what it means that preflight found nothing
_MEMORY_ALONE = ("F3a",)  # costs memory, and harms no training: possible, and never named for a bad curve
FOUND, HELD = 10, 9  # what preflight saw of the script weighs so much, for a cause and against it
ERROR = 25  # and an error's text in the log, which nothing outweighs


class RuleError(FailureLabError):
    """A rule's file is not as it must be."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """Something that speaks for a cause, or against it.

    Attributes:
        weight: that it adds or takes off.
        when: all must hold.
        says: what was observed; `{figure}` is replaced.
        why: what it means.
        from_step: the figure that says from which step on, if any.
    """

    weight: int
    when: tuple[predicates.Predicate, ...]
    says: str
    why: str
    from_step: str = ""

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
    """A cause as it stands for one run."""

    failure: str
    title: str
    weight: int
    pro: list[str]
    contra: list[str]
    probe: str
    from_step: float | None = None
    repair: str = ""


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
        raw.take("weight", int, 1), when, raw.text("says"), raw.text("why", ""), raw.text("from_step", "")
    )
    raw.done()
    return observation


def _observe_texts(cause: str) -> tuple[list[Observation], list[Observation]]:
    """Return what speaks for and against every failure: its text in a log, and what preflight saw of the script."""

    def observe(kind: str, weight: int, says: str, why: str, from_step: str = "") -> Observation:
        figure = f"{kind}_{cause}"
        return Observation(weight, predicates.parse_all([f"{figure} ~ '.'"]), f"{says}{{{figure}}}", why, from_step)

    found = 1 if cause in _MEMORY_ALONE else FOUND
    pro = [
        observe("error", ERROR, "its error, ", "the log has the error of this failure"),
        observe("notice", 1, "a text that other runs print too, ", "alone it says little"),
        observe("preflight_found", found, "preflight: ", "found by preflight", "first_step"),
    ]
    held = [] if cause in _OWN_WORDS else [observe("preflight_held", HELD, "preflight: ", "held by preflight")]
    return pro, held


def judge(figures: dict[str, Value]) -> tuple[list[Cause], list[tuple[int, str]]]:
    """Return the causes that something speaks for, likeliest first, and each sign of a fault with its weight."""
    rules, signs = load()
    causes = []
    for rule in rules:
        pro = [part for part in rule.pro if part.holds(figures)]
        contra = [part for part in rule.contra if part.holds(figures)]
        if rule.keeps_reward_flat and _RISES.holds(figures):
            contra.append(_RISES)
        weight = sum(part.weight for part in pro) - sum(part.weight for part in contra)
        weight = min(weight, CONVICTS - 1) if _RISES in contra else weight
        if not pro or weight <= 0:
            continue
        begins = [figures.get(part.from_step) for part in pro if part.from_step]
        causes.append(
            Cause(
                rule.cause,
                rule.title,
                weight,
                [_say(part, figures) for part in sorted(pro, key=lambda part: -part.weight)],
                [_say(part, figures) for part in contra],
                rule.probe,
                next((begin for begin in begins if isinstance(begin, int | float)), None),
                rule.repair,
            )
        )
    causes.sort(key=lambda cause: -cause.weight)  # stable: of equal weight in the order of ids
    return causes, [(sign.weight, _say(sign, figures)) for sign in signs if sign.holds(figures)]


def _say(part: Observation, figures: dict[str, Value]) -> str:
    try:
        text = predicates.fill(part.says, figures)
    except predicates.PredicateError:
        text = part.says
    return text


def explain() -> str:
    """Return the rules as text."""
    rules, signs = load()
    lines = [f"A cause is named from a weight of {CONVICTS} on. Below that, it is only possible.", ""]
    lines.append("SIGNS that something is wrong, whatever the cause")
    for sign in signs:
        lines += [f"      {' and '.join(map(str, sign.when))}", f"          {sign.why or sign.says}"]
    for rule in rules:
        lines += ["", f"{rule.cause} {rule.title}"]
        lines += ["  never named where the reward rises"] * rule.keeps_reward_flat
        for symbol, parts in (("+", rule.pro), ("-", rule.contra)):
            for part in parts:
                lines.append(f"  {symbol}{part.weight:<3} {' and '.join(map(str, part.when))}")
                lines.append(f"          {part.why or part.says}")
        lines.append(f"  probe: {rule.probe}")
    return "\n".join(lines)
