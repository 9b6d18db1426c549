"""What explains a gradient that is wrong, and mistakes that are planted in the definition.

A mistake is the definition with one of its functions replaced. It is named where it comes as near to the trainer as
rounding allows, and no other one does; where several do, all are listed and none is named. In this order:

1. tensors without gradient,
2. other scores of the right tokens: a pass of the definition for each,
3. the right direction, or the opposite one, times a factor,
4. other weights of the right scores, as they were read (`reading`): those of ranks, of other definitions, and of
   micro-batches or rows (`weights`).

Only those mistakes have a name that a name was right of on scripts that its author had not seen, or that the registry
knows. What else is wrong is found all the same, and told by its figures.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from failurelab.textbook.apart import NAMES, Apart, Floor, measure_apart, norm
from failurelab.textbook.definition import DIVISORS, GRPO, SCALES, Definition, clipped, k3, weighted_sum
from failurelab.textbook.fields import Options
from failurelab.textbook.gradient import Gradient, OutOfMemory, Step, Tally
from failurelab.textbook.ranks import ALONE, Ranks
from failurelab.textbook.reading import Pass
from failurelab.textbook.rows import Row, Scoring
from failurelab.textbook.together import DIVIDED, SUMMED, tokens_of
from failurelab.textbook.weights import (
    NEARBY,
    Explanation,
    explain_weights,
    factors_of,
    merged,
    read_rows,
    settle,
    slopes_of,
)

MISSING = "tensors without gradient"
NO_GRADIENT = "no gradient"
NO_MASK = "no attention mask"
LEFT_OUT: dict[str, dict[str, Any]] = {  # what the arguments may ask for, and the options without it
    "penalty left out": {"beta": 0.0, "kl_in_reward": 0.0},
    "bounds left out": {"epsilon": None, "epsilon_high": None, "delta": None},
    "cut completions trained on": {"mask_truncated_completions": False},
}
CONTROLS = ("scores shifted by one", "rows of the prompt", NO_MASK, "temperature")
# What a right gradient tells of, if one mistake of each kind at least would have shown on the same batch.
OTHER_ROWS, MASKED, DIVIDED_OTHERWISE = "advantages of other rows", "mask of the completion", "divisor of a row"
OWN_TOKENS, BETWEEN = "each rank's own tokens as the divisor", "advantages mixed between ranks"
MECHANISMS = (OTHER_ROWS, MASKED, DIVIDED_OTHERWISE, OWN_TOKENS, BETWEEN)
BY_STEP = ("dapo", "cispo", "vespo")  # losses that divide by the tokens of all ranks
When = Callable[[Sequence[Row], Options], bool]


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A mistake that people make."""

    name: str  # of the kind of mistake
    line: str  # which one of the kind
    change: Mapping[str, Callable[..., Any]]  # the function of the definition that is another one, by its name there
    when: When = lambda rows, options: True  # whether it can make a difference

    def replace(self, definition: Definition) -> Definition:
        """Return a definition with this mistake in it."""
        change: dict[str, Any] = dict(self.change)
        return dataclasses.replace(definition, **change)


def _scored(temperature: float | None = None, **otherwise: Any) -> dict[str, Callable[..., Any]]:
    def scoring(options: Options, pad: int) -> Scoring:
        return Scoring(temperature or options.temperature, pad=pad, **otherwise)

    return {"scoring": scoring}


def _is_old(rows: Sequence[Row], options: Options) -> bool:
    return any(row.old_logps is not None for row in rows)


def _where(padded: bool = False, heated: bool = False) -> When:
    """Return what says that prompts are padded, and that tokens are drawn at another temperature than 1, if asked."""
    return lambda rows, options: (
        (not padded or any(len(row.prompt) < row.padded[0] for row in rows))
        and (not heated or options.temperature != 1)
    )


_BOTH = "and without temperature"
_FRONT, _BARE = {"padded": True, "from_prompt": True}, {"padded": True, "attend_padding": True}
SCORES = (
    Suspect("scores shifted by one", "a token is scored after it was read", _scored(shift=1)),
    # Rows of the prompt: TRL #2770. trl 0.14 hands no attention mask over (TRL #2708), and leaves the temperature out.
    Suspect("rows of the prompt", "", _scored(**_FRONT)),
    Suspect("rows of the prompt", "without attention mask", _scored(**_FRONT | _BARE), _where(padded=True)),
    Suspect("rows of the prompt", "without temperature", _scored(1.0, **_FRONT), _where(heated=True)),
    Suspect(
        "rows of the prompt",
        "without attention mask and temperature",
        _scored(1.0, **_FRONT | _BARE),
        _where(True, True),
    ),
    Suspect(NO_MASK, "", _scored(**_BARE), _where(padded=True)),
    Suspect("temperature", "left out", _scored(1.0), _where(heated=True)),
    Suspect(NO_MASK, _BOTH, _scored(1.0, **_BARE), _where(True, True)),
    Suspect("temperature", "0.7 in place of 1", _scored(0.7), lambda rows, options: options.temperature == 1),
    Suspect(
        "temperature",
        "of the arguments, and not that of the sampling",
        {"scoring": lambda options, pad: Scoring(options.asked_temperature, pad=pad)},
        lambda rows, options: options.asked_temperature not in (1.0, options.temperature),
    ),
)
_OF_PAIRS = ("scores shifted by one", "rows of the prompt", NO_MASK)  # whose policy has no temperature
ENDS = tuple(  # a mask that the attention reads too, or the loss alone
    Suspect(f"{end} token left out", "", _scored(tokens=f"no {end}", mask_attends=both))
    for end in ("first", "last")
    for both in (True, False)
)


def _not_centered(rewards: torch.Tensor, group: torch.Tensor, batch: torch.Tensor, options: Options) -> torch.Tensor:
    total = weighted_sum(rewards, rewards.isnan().all(1), options)
    return (total / SCALES[options.scale_rewards](total, group, batch)).nan_to_num(nan=0.0)


def _swapped(ratio: torch.Tensor, worth: torch.Tensor, logps: torch.Tensor, options: Options) -> torch.Tensor:
    high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    return clipped(ratio, worth, logps, dataclasses.replace(options, epsilon=high, epsilon_high=options.epsilon))


WEIGHTS = (  # of the right scores
    Suspect("no baseline", "the group's mean is not subtracted", {"advantages": _not_centered}),
    Suspect(
        "divided by the tokens of the generation",
        "",
        {"divisor": lambda sizes, options: sizes.generation_tokens},
        lambda rows, options: (
            options.loss_type in ("dapo", "cispo") and len({(row.batch, row.micro is None) for row in rows}) > 1
        ),
    ),  # TRL #6024
    *(
        Suspect("KL divergence", line, {"kl": kl}, lambda rows, options: bool(options.beta))
        for line, kl in {
            "left out": torch.zeros_like,
            "opposite sign": lambda difference: -k3(difference),
            "policy and reference swapped": lambda difference: k3(-difference),
        }.items()
    ),
    Suspect(
        "top_entropy_quantile",
        "left out",
        {"quantile": lambda options: 1.0},
        lambda rows, options: options.top_entropy_quantile < 1,
    ),
    Suspect("ratio", "always 1", {"log_ratio": lambda difference, *_: difference - difference.detach()}, _is_old),
    *(
        Suspect("clipping", line, {"objective": objective}, _is_old)
        for line, objective in {
            "left out": lambda ratio, worth, logps, options: ratio * worth,
            "also where it does not bind": lambda ratio, worth, logps, options: ratio.clamp(*options.bounds) * worth,
            "epsilon and epsilon_high swapped": _swapped,
        }.items()
    ),
)
_OF_RATIOS = tuple(each for each in WEIGHTS if each.when is _is_old)


@dataclasses.dataclass(frozen=True)
class Fit:
    """How near a suspect comes: its name and line, the trainer beside it, and what it is multiplied by."""

    name: str
    line: str
    apart: Apart
    factor: float = 1.0

    def __str__(self) -> str:
        factor = "" if self.factor == 1 else f", times {self.factor:.3g}"
        return f"{self.name}{f' ({self.line})' if self.line else ''}{factor}"


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for what explains one gradient."""

    rows: Sequence[Row]  # of the step
    options: Options  # of the definition
    definition: Definition  # of the trainer's kind
    theirs: Gradient  # the trainer's gradient
    floor: Floor  # of the measurement
    gradient: Callable[..., Gradient]  # gives the expected gradient of a definition
    pad: int = 0  # token id of the padding
    accumulated: int = 1  # micro-batches that were asked for, of a process
    ranks: Ranks = ALONE  # the processes that train together
    passes: Sequence[Pass] = ()  # of the trainer's loss, as they were read
    scale: float = 1.0  # that their weights are divided by

    @property
    def near(self) -> float:
        """How near a suspect must come; where right gradients lie farther apart, many a one comes as near by chance."""
        return min(self.floor.near, NAMES)

    @property
    def scores(self) -> tuple[Suspect, ...]:
        """Other scores that the algorithm may have."""
        return tuple(each for each in SCORES if self.definition.together == 1 or each.name in _OF_PAIRS)

    @property
    def others(self) -> list[Suspect]:
        """Other weights of the right scores that the algorithm may have."""
        return [*(WEIGHTS if self.definition.name == GRPO.name else _OF_RATIOS * (self.definition.together == 1))]

    def explain(self, ours: Gradient, apart: Apart, tally: Tally) -> Explanation:
        """Return what explains the trainer's gradient.

        Args:
            ours: the expected gradient.
            apart: the trainer's and this one.
            tally: of the definition's pass.
        """
        if missing := self._missing(ours):
            return missing
        tried = self._try(self.scores, ours)
        explanation = _choose(tried, apart.distance, self.near) or self._factor(apart, tried)
        if explanation is None:
            tried = sorted([*tried, *self._try(ENDS, ours)], key=lambda fit: fit.apart.distance)
            explanation = _choose(tried, apart.distance, self.near) or self._of_weights(tally)
        if explanation is None:
            text = f"None of {len(tried)} other scores explains it"
            text += f"; the nearest: {tried[0]}, {tried[0].apart}." if tried else "."
            explanation = Explanation(None, f"{text} Nor do other weights of the tokens.")
        return dataclasses.replace(explanation, tried={fit.name: fit.apart for fit in reversed(tried)})

    def _missing(self, ours: Gradient) -> Explanation | None:
        """Return the explanation that tensors, or all, have no gradient, where all others have the right one."""
        if not norm(self.theirs):
            return Explanation(NO_GRADIENT, "Named: no gradient, in any of the tensors.")
        empty = [name for name, grad in self.theirs.items() if not grad.any() and ours[name].any()]
        rest = {name: grad for name, grad in ours.items() if name not in empty and grad.any()}
        if empty and rest and self.floor.holds(measure_apart({name: self.theirs[name] for name in rest}, rest)):
            return Explanation(MISSING, f"Named: {MISSING} ({len(empty)} of {len(ours)}, {empty[0]} first).")
        return None

    def _factor(self, apart: Apart, tried: Sequence[Fit]) -> Explanation | None:
        """Return the explanation that the definition's gradient is multiplied by a constant; None where it is not.

        A suspect that comes nearer as it is than the definition does with a size of its own is at least as likely: a
        temperature that is left out is nearly a factor, where the model hardly knows what comes next.
        """
        if not self.floor.holds(Apart(abs(apart.cosine), 1.0, 0.0)):
            return None
        if apart.cosine < 0:
            factor = 1.0 if self._is_one(apart.size) else apart.size
            return _say([Fit("opposite sign", "", apart, factor)], "direction")
        fits = [Fit(name, line, apart) for name, line, size in self._factors() if self._is_one(apart.size / size)]
        fits = [*[fit for fit in tried if fit.apart.distance < _beside(apart)], *fits]
        fits = fits or list(self._without_temperature(tried))
        return _say(fits or [Fit("constant factor", "", apart, apart.size)], "direction")

    def _without_temperature(self, tried: Sequence[Fit]) -> Iterator[Fit]:
        """Yield named factors that a gradient without the temperature is multiplied by: trl 0.14 can have both."""
        for fit in tried:
            if "temperature" in fit.name and _beside(fit.apart) <= self.near:
                for name, line, size in self._factors():
                    if self._is_one(fit.apart.size / size):
                        yield Fit(name, f"{line}, and the temperature is left out", fit.apart, size)

    def _of_weights(self, tally: Tally) -> Explanation | None:
        """Return the explanation that the right scores were given other weights; None where these are not known."""
        step = Step(self.rows, self.options, self.definition)
        scale = self.scale * self.ranks.count
        parts = self.ranks.collect(lambda: read_rows(self.passes, step, self.pad, scale))
        if any(part is None for part in parts):
            return None
        right = slopes_of(self.definition, step, tally, self.rows)
        read = settle({name: own for part in parts for name, own in (part or {}).items()}, right)
        every = merged(read, step)
        apart, near = measure_apart(every, merged(right, step)), max(self.near, NEARBY)
        if not norm(read) or apart.distance <= near:
            return None
        ranks = [row.rank for row in step.rows] if self.ranks.count > 1 else []
        factors = factors_of(read, right, ranks, step, near) if ranks else {}
        of_ranks = self._of_ranks(list(factors.values())) if factors else Explanation()
        if of_ranks.named:
            return of_ranks
        tried = []
        for suspect in self.others:
            if suspect.when(self.rows, self.options):
                other = merged(slopes_of(suspect.replace(self.definition), step, tally, self.rows), step)
                if measure_apart(other, merged(right, step)).distance > near:
                    tried.append(Fit(suspect.name, suspect.line, measure_apart(every, other)))
        tried.sort(key=lambda fit: fit.apart.distance)
        if explanation := _choose(tried, apart.distance, near):
            return explanation
        return of_ranks if of_ranks.text else explain_weights(read, right, step, near)

    def _of_ranks(self, factors: Sequence[float]) -> Explanation:
        """Return what is said of ranks whose parts of the gradient are multiplied by numbers."""
        told = ", ".join(f"{round(each, 3):.3g}" for each in factors)
        line = f"the ranks' parts of the gradient are multiplied by {told}"
        shares = [factor * count for factor, count in zip(factors, tokens_of(self.rows, self.options))]
        if shares[0] and all(self._is_one(share / shares[0]) for share in shares):
            name = "each rank divides by its own tokens"
            return Explanation(name, f"Named: {name}: {line}.")
        return Explanation(None, f"Read: {line}.")

    def _is_one(self, size: float) -> bool:
        return self.floor.holds(Apart(1.0, size, 0.0))

    def _factors(self) -> Iterator[tuple[str, str, float]]:
        """Yield factors that have a name: what micro-batches and generations may be divided by."""
        trained = [row for row in self.rows if row.micro is not None]
        ranks = len({row.rank for row in trained})
        count, every = len({row.micro for row in trained}) // ranks, sum(row.length() for row in self.rows)
        share = sum(row.length() for row in trained) / max(1, every)
        generations = len({row.batch for row in trained})
        by_tokens = self.options.loss_type in ("dapo", "cispo")
        of_generation = share < 1 and by_tokens
        if ranks > 1:
            yield SUMMED, "", float(ranks)
            yield DIVIDED, "", 1 / ranks
        if generations > 1 and by_tokens:  # each divided by its own, as trl 0.22 to 1.9 do
            yield "divided by the tokens of the generation", "each by its own", float(generations)
        if of_generation:
            yield "divided by the tokens of the generation", "", share
        if count < self.accumulated:
            line = f"{count} micro-batches, the rest of an epoch, are divided by {self.accumulated}"
            yield "accumulation", line, count / self.accumulated
        if count > 1:
            if count != generations or not by_tokens:  # else it is the same as each by its own
                yield "accumulation", "micro-batches are added", float(count)
            if not of_generation:  # it divides by as much, where each step of the generation is alike
                yield "accumulation", "divided twice", 1 / count

    def _try(self, some: Sequence[Suspect], ours: Gradient) -> list[Fit]:
        """Return what would make another gradient than the definition's, `ours`, the nearest first."""
        tried = []
        for suspect in some:
            other = self._gradient_of(suspect)
            if other is not None and measure_apart(other, ours).distance > self.near:
                tried.append(Fit(suspect.name, suspect.line, measure_apart(self.theirs, other)))
        return sorted(tried, key=lambda fit: fit.apart.distance)

    def plant(self, ours: Gradient) -> dict[str, Apart]:
        """Return how far planted mistakes lie from the definition's gradient, `ours`.

        These are the first of each of CONTROLS, of each of MECHANISMS the first that shows, or else the last, and what
        is asked for of LEFT_OUT.
        """
        planted = {"opposite sign": measure_apart({name: -grad for name, grad in ours.items()}, ours)}
        for suspect in self.scores:
            if suspect.name in CONTROLS and suspect.name not in planted:
                other = self._gradient_of(suspect)
                if other is not None:
                    planted[suspect.name] = measure_apart(other, ours)
        for name, without in LEFT_OUT.items():
            options = dataclasses.replace(self.options, **without)
            if any(getattr(self.options, own) for own in without) and self.definition.together == 1:
                planted[name] = measure_apart(self.gradient(options), ours)
        for name, mistakes in self._mechanisms():
            for mistake in mistakes:
                other = self._gradient_of(mistake)
                if other is not None:
                    planted[name] = measure_apart(other, ours)
                    if not self.floor.holds(planted[name]):
                        break
        return planted

    def _mechanisms(self) -> Iterator[tuple[str, Sequence[Suspect]]]:
        """Yield mistakes that may be planted, by what they are mistakes of."""
        rolled = {"advantages": lambda *given: self.definition.advantages(*given).roll(1)}
        yield OTHER_ROWS, [Suspect(OTHER_ROWS, "", rolled)]
        yield MASKED, ENDS
        if self.definition.name == GRPO.name and self.options.max_completion_length != 1:
            # one that shows where completions differ in length, and not by a constant factor
            kind = "dapo" if self.options.loss_type in ("grpo", "sapo") else "grpo"
            yield DIVIDED_OTHERWISE, [Suspect(DIVIDED_OTHERWISE, "", {"divisor": DIVISORS[kind]})]
        if self.ranks.count > 1:
            own = {"divisor": lambda sizes, options: sizes.rank_tokens}
            yield OWN_TOKENS, [Suspect(OWN_TOKENS, "", own, lambda rows, options: options.loss_type in BY_STEP)]
            count = len(self.rows) // self.ranks.count
            rolled = {"advantages": lambda *given: self.definition.advantages(*given).roll(count)}
            yield BETWEEN, [Suspect(BETWEEN, "", rolled)]

    def _gradient_of(self, suspect: Suspect) -> Gradient | None:
        if not suspect.when(self.rows, self.options):
            return None
        try:
            gradient = self.gradient(self.options, definition=suspect.replace(self.definition))
        except (OutOfMemory, ValueError):
            return None  # the suspect's own computation is impossible here: no row is left, or memory is
        return gradient if all(bool(grad.isfinite().all()) for grad in gradient.values()) else None


def _choose(tried: Sequence[Fit], nothing: float, near: float) -> Explanation | None:
    """Return what to say of those that fit, or None where none does; `nothing` is how far the definition lies."""
    if not tried or tried[0].apart.distance > near or nothing - tried[0].apart.distance <= near:
        return None
    best = tried[0].apart.distance
    fits = [fit for fit in tried if fit.apart.distance - best <= near]
    # One of two mistakes that alone explains the gradient: what the other adds does not show here.
    return _say([fit for fit in fits if fit.line != _BOTH] or fits, "gradient")


def _say(fits: Sequence[Fit], same: str) -> Explanation:
    """Return the explanation that some suspects fit, the best first: it is named where all are of its kind."""
    if len({fit.name for fit in fits}) == 1:
        said = f"Named: {fits[0]}, whose {same} is the trainer's: {fits[0].apart}."
        return Explanation(fits[0].name, said, line=fits[0].line)
    listed = "; ".join(map(str, fits))
    return Explanation(None, f"{len(fits)} suspects have the trainer's {same}, so none is named: {listed}.")


def _beside(apart: Apart) -> float:
    """Return the distance that is left when the size is made right."""
    return math.sqrt(max(0.0, 1 - apart.cosine**2))
