"""Which suspect explains a gradient that is wrong: the definition with one of its functions replaced.

A suspect is named where its gradient is the trainer's within the floor, and nearer than that of the definition and of
every other suspect by more than the floor. Where several fit, all are listed and none is named. These are mistakes that
people have made; what is none of them is solved for (`solve`): which weight each row and each place was given. In this
order, and a later one only where the one before named nothing:

1. tensors without gradient,
2. other scores of the right tokens,
3. the right direction, or the opposite one, times a factor,
4. of several processes, other weights of the ranks' parts,
5. any other suspect, as it is or times a constant factor,
6. other weights of the rows, or of places in them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from failurelab.textbook.apart import NAMES, Apart, Floor, measure_apart, norm
from failurelab.textbook.definition import DIVISORS, SCALES, Definition, clipped, k3, weighted_sum
from failurelab.textbook.fields import Options
from failurelab.textbook.gradient import EXACT, Gradient, OutOfMemory, Precision, Step, Tally
from failurelab.textbook.ranks import ALONE, Ranks
from failurelab.textbook.rows import Row, Scoring
from failurelab.textbook.solve import Solution, say, solve
from failurelab.textbook.together import (
    DIVIDED,
    OF_ONE,
    SUMMED,
    advantages_between,
    name_factors,
    tokens_of,
)

MISSING = "tensors without gradient"
NO_GRADIENT = "no gradient"
ALIKE = 0.1  # how far a part of a generation may lie from the same share for each of its steps
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
    """A mistake that people make.

    Attributes:
        name: of the kind of mistake.
        line: which one of the kind.
        change: the function of the definition that is another one, by its name there.
        when: whether it can make a difference.
        source: a thread or release that had it.
    """

    name: str
    line: str
    change: Mapping[str, Callable[..., Any]]
    when: When = lambda rows, options: True
    source: str = ""

    def replace(self, definition: Definition) -> Definition:
        """Return a definition with this mistake in it."""
        change: dict[str, Any] = dict(self.change)
        return dataclasses.replace(definition, **change)


def _scored(temperature: float | None = None, **otherwise: Any) -> dict[str, Callable[..., Any]]:
    def scoring(options: Options, pad: int) -> Scoring:
        return Scoring(temperature or options.temperature, pad=pad, **otherwise)

    return {"scoring": scoring}


def _is_padded(rows: Sequence[Row], options: Options) -> bool:
    return any(len(row.prompt) < row.padded[0] for row in rows)


def _is_warm(rows: Sequence[Row], options: Options) -> bool:
    return options.temperature != 1


def _is_old(rows: Sequence[Row], options: Options) -> bool:
    return any(row.old_logps is not None for row in rows)


def _is_cut(rows: Sequence[Row], options: Options) -> bool:
    return options.top_entropy_quantile < 1


def _is_cut_short(rows: Sequence[Row], options: Options) -> bool:
    return any(row.ended for row in rows) and not all(row.ended for row in rows)


_BARE: dict[str, Any] = {"padded": True, "attend_padding": True}  # trl 0.14 hands no attention mask over
_FRONT: dict[str, Any] = {"padded": True, "from_prompt": True}
SCORES = (
    Suspect("scores shifted by one", "a token is scored after it was read", _scored(shift=1)),
    Suspect("rows of the prompt", "", _scored(**_FRONT), source="TRL #2770"),
    Suspect("rows of the prompt", "without attention mask", _scored(**_FRONT | _BARE), _is_padded),
    Suspect("rows of the prompt", "without temperature", _scored(1.0, **_FRONT), _is_warm),
    Suspect(
        "rows of the prompt",
        "without attention mask and temperature",
        _scored(1.0, **_FRONT | _BARE),
        lambda rows, options: _is_padded(rows, options) and _is_warm(rows, options),
    ),
    Suspect("no attention mask", "", _scored(**_BARE), _is_padded, "TRL #2708"),
    Suspect(
        "no attention mask and no temperature",
        "",
        _scored(1.0, **_BARE),
        lambda rows, options: _is_padded(rows, options) and _is_warm(rows, options),
        "trl 0.14",
    ),
    Suspect("temperature", "left out", _scored(1.0), _is_warm, "TRL #3029"),
    Suspect("temperature", "0.7 in place of 1", _scored(0.7), lambda rows, options: options.temperature == 1),
    Suspect(
        "temperature",
        "of the arguments, and not that of the sampling",
        {"scoring": lambda options, pad: Scoring(options.asked_temperature, pad=pad)},
        lambda rows, options: options.asked_temperature not in (1.0, options.temperature),
    ),
)
OTHERS = (
    # a mask that the attention reads too; where the loss alone reads it, the weights of places tell
    Suspect("first token left out", "", _scored(tokens="no first", mask_attends=True)),
    Suspect("last token left out", "", _scored(tokens="no last", mask_attends=True)),
    Suspect("last token left out", "where it is the end", _scored(tokens="no end", mask_attends=True), _is_cut_short),
    *(
        Suspect(
            "the environment's tokens are trained on",
            "and count in the divisor" * counted,
            _scored(trains_on_given=True, counted=counted),
            lambda rows, options: any(row.given for row in rows),
            "unsloth #5673",
        )
        for counted in (False, True)
    ),
    Suspect("no baseline", "the group's mean is not subtracted", {"advantages": lambda *given: _not_centered(*given)}),
    *(
        Suspect("loss_type", kind, {"divisor": lambda sizes, options, kind=kind: DIVISORS[kind](sizes, options)})
        for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
    ),
    Suspect(
        "divided by the tokens of the generation",
        "",
        {"divisor": lambda sizes, options: sizes.generation_tokens},
        lambda rows, options: (
            options.loss_type in ("dapo", "cispo") and len({(row.batch, row.micro is None) for row in rows}) > 1
        ),
        "TRL #6024",
    ),
    *(
        Suspect("KL divergence", line, {"kl": kl}, lambda rows, options: bool(options.beta))
        for line, kl in {
            "left out": torch.zeros_like,
            "opposite sign": lambda difference: -k3(difference),
            "policy and reference swapped": lambda difference: k3(-difference),
        }.items()
    ),
    *(
        Suspect("entropy", line, {"entropy": entropy}, lambda rows, options: bool(options.entropy_coef))
        for line, entropy in {
            "left out": lambda entropies, counts: 0 * entropies.sum(),
            "opposite sign": lambda entropies, counts: -(entropies / counts).sum(),
        }.items()
    ),
    Suspect("top_entropy_quantile", "left out", {"quantile": lambda options: 1.0}, _is_cut),
    Suspect("top_entropy_quantile", "of 1", {"quantile": lambda options: 1 - options.top_entropy_quantile}, _is_cut),
    Suspect("ratio", "always 1", {"log_ratio": lambda difference, *_: difference - difference.detach()}, _is_old),
    *(
        Suspect("clipping", line, {"objective": objective}, _is_old)
        for line, objective in {
            "left out": lambda ratio, worth, logps, options: ratio * worth,
            "also where it does not bind": lambda ratio, worth, logps, options: ratio.clamp(*options.bounds) * worth,
            "epsilon and epsilon_high swapped": lambda ratio, worth, logps, options: clipped(
                ratio, worth, logps, _swapped(options)
            ),
        }.items()
    ),
)


@dataclasses.dataclass(frozen=True)
class Suspects:
    """What is looked for with one algorithm: other scores of the right tokens, and all else."""

    scores: tuple[Suspect, ...] = SCORES
    others: tuple[Suspect, ...] = OTHERS


def _named(some: Sequence[Suspect], *names: str) -> tuple[Suspect, ...]:
    return tuple(suspect for suspect in some if suspect.name in names)


_ENDS_LEFT_OUT = ("first token left out", "last token left out")
_OF_ALGORITHM = {
    "RLOO": Suspects(others=_named(OTHERS, *_ENDS_LEFT_OUT, "ratio", "clipping")),
    "Online DPO": Suspects(
        scores=_named(SCORES, "scores shifted by one", "rows of the prompt", "no attention mask"),
        others=_named(OTHERS, *_ENDS_LEFT_OUT),
    ),
}


def suspects_of(name: str) -> Suspects:
    """Return the suspects of an algorithm, by the name of its definition."""
    return _OF_ALGORITHM.get(name, Suspects())


def _not_centered(rewards: torch.Tensor, group: torch.Tensor, batch: torch.Tensor, options: Options) -> torch.Tensor:
    total = weighted_sum(rewards, rewards.isnan().all(1), options)
    return (total / SCALES[options.scale_rewards](total, group, batch)).nan_to_num(nan=0.0)


def _swapped(options: Options) -> Options:
    high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    return dataclasses.replace(options, epsilon=high, epsilon_high=options.epsilon)


@dataclasses.dataclass(frozen=True)
class Fit:
    """How near a suspect comes: its name and line, its gradient beside the trainer's, and what it is multiplied by."""

    name: str
    line: str
    apart: Apart
    factor: float = 1.0

    def __str__(self) -> str:
        factor = "" if self.factor == 1 else f", times {self.factor:.3g}"
        return f"{self.name}{f' ({self.line})' if self.line else ''}{factor}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What explains the gradient: the name, or None, and its line; a text; suspects beside it, and solved weights."""

    named: str | None = None
    text: str = ""
    line: str = ""
    tried: Mapping[str, Apart] = dataclasses.field(default_factory=dict)
    solved: tuple[Solution, ...] = ()


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for what explains one gradient.

    Attributes:
        model: the policy, unwrapped.
        rows: of the step.
        options: of the definition.
        definition: of the trainer's kind.
        theirs: the trainer's gradient.
        floor: of the measurement.
        gradient: gives the expected gradient of a definition.
        pad: token id of the padding.
        precision: of the trainer's numbers, or exact ones.
        accumulated: micro-batches that were asked for, of a process.
        ranks: the processes that train together.
        part: gives this process's part of the expected gradient.
        suspects: of the trainer's algorithm.
    """

    model: nn.Module
    rows: Sequence[Row]
    options: Options
    definition: Definition
    theirs: Gradient
    floor: Floor
    gradient: Callable[..., Gradient]
    pad: int = 0
    precision: Precision = EXACT
    accumulated: int = 1
    ranks: Ranks = ALONE
    part: Callable[..., Gradient] = dict
    suspects: Suspects = Suspects()

    @property
    def near(self) -> float:
        """How near a suspect must come; where right gradients lie farther apart, many a one comes as near by chance."""
        return min(self.floor.near, NAMES)

    def explain(self, ours: Gradient, apart: Apart, tally: Tally) -> Explanation:
        """Return what explains the trainer's gradient.

        Args:
            ours: the expected gradient.
            apart: the trainer's and this one.
            tally: of the definition's pass.
        """
        if missing := self._missing(ours):
            return missing
        tried = self._try(self.suspects.scores, ours)
        explanation = self._choose(tried, apart.distance)
        if self.floor.holds(Apart(abs(apart.cosine), 1.0, 0.0)):
            return dataclasses.replace(explanation or self._factor(apart, tried, tally), tried=_nearest(tried))
        explanation = explanation or self._of_ranks()
        # with old log-probabilities other scores move the ratios, and so clip as a mistake of another kind does
        if explanation is None or _is_old(self.rows, self.options):
            more = [*self.suspects.others, *self._between_ranks()]
            tried = sorted([*tried, *self._try(more, ours)], key=lambda fit: fit.apart.distance)
            explanation = self._choose(tried, apart.distance)
        explanation = explanation or self._with_factor(tried)
        if explanation and explanation.named in {suspect.name for suspect in self.suspects.scores}:
            return dataclasses.replace(explanation, tried=_nearest(tried))  # other scores: their weights tell nothing
        step = Step(self.rows, self.options, self.definition)
        try:
            solved = tuple(solve(self.model, step, tally, self.theirs, self.precision, self.pad, self.ranks.add))
        except OutOfMemory:
            solved = ()
        if explanation is None and solved and solved[0].rest <= self.near and solved[0].off:
            name, line = say(solved[0], step)
            text = f"{f'Named: {name}: ' * bool(name) or 'Solved for: '}{line}"
            explanation = Explanation(name or None, f"{text}; {solved[0].rest:.2g} of the gradient is left over.")
        if explanation is None:
            text = f"None of {len(tried)} suspects explains it"
            text += f"; the nearest: {tried[0]}, {tried[0].apart}." if tried else "."
            if solved:
                text += f" Nor do other weights of rows or places: {solved[0].rest:.0%} of the gradient is left over."
            explanation = Explanation(None, text)
        return dataclasses.replace(explanation, tried=_nearest(tried), solved=solved)

    def _missing(self, ours: Gradient) -> Explanation | None:
        """Return the explanation that tensors, or all, have no gradient, where all others have the right one."""
        if not norm(self.theirs):
            return Explanation(NO_GRADIENT, "Named: no gradient, in any of the tensors.")
        empty = [name for name, grad in self.theirs.items() if not grad.any() and ours[name].any()]
        rest = {name: grad for name, grad in ours.items() if name not in empty and grad.any()}
        if empty and rest and self.floor.holds(measure_apart({name: self.theirs[name] for name in rest}, rest)):
            return Explanation(MISSING, f"Named: {MISSING} ({len(empty)} of {len(ours)}, {empty[0]} first).")
        return None

    def _factor(self, apart: Apart, tried: Sequence[Fit], tally: Tally) -> Explanation:
        """Return the explanation that the definition's gradient is multiplied by a constant.

        A suspect that comes nearer as it is than the definition does with a size of its own is at least as likely: a
        temperature that is left out is nearly a factor, where the model hardly knows what comes next.
        """
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

    def _of_ranks(self) -> Explanation | None:
        """Return the explanation that the parts of the ranks were not added up alike."""
        if self.ranks.count == 1:
            return None
        factors, rest = self.ranks.factors(self.part, self.theirs)
        if rest > self.near:
            return None
        name, line = name_factors(factors, tokens_of(self.rows, self.options), self._is_one)
        return Explanation(name, f"Named: {name}: {line}.") if name else None

    def _between_ranks(self) -> list[Suspect]:
        """Return suspects that there are with several processes alone."""
        if self.ranks.count == 1:
            return []
        functions = advantages_between(self.rows, self.definition)
        return [Suspect(BETWEEN, line, {"advantages": own}) for line, own in functions]

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
            if not of_generation or abs(share * ranks - 1) > ALIKE:  # by as much, with as many steps as ranks
                yield DIVIDED, "", 1 / ranks
            tokens = tokens_of(self.rows, self.options)
            for rank, own in enumerate(tokens):
                if by_tokens and own and share == 1 and not self._is_one(sum(tokens) / (ranks * own)):
                    yield OF_ONE, f"rank {rank}'s, times {ranks}", sum(tokens) / (ranks * own)
                    yield OF_ONE, f"rank {rank}'s", sum(tokens) / own
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
        planted = self._plant_scores(ours)
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

    def _mechanisms(self) -> Iterator[tuple[str, list[Suspect]]]:
        """Yield mistakes that may be planted, by what they are mistakes of."""
        rolled = {"advantages": lambda *given: self.definition.advantages(*given).roll(1)}
        yield OTHER_ROWS, [Suspect(OTHER_ROWS, "", rolled)]
        yield MASKED, list(_named(self.suspects.others, *_ENDS_LEFT_OUT))
        if self.options.max_completion_length != 1:  # else no completion is longer than another
            yield DIVIDED_OTHERWISE, self._other_divisors()
        if self.ranks.count > 1:
            own = {"divisor": lambda sizes, options: sizes.rank_tokens}
            yield OWN_TOKENS, [Suspect(OWN_TOKENS, "", own, lambda rows, options: options.loss_type in BY_STEP)]
            yield BETWEEN, self._between_ranks()

    def _other_divisors(self) -> list[Suspect]:
        """Return mistakes that show where completions differ in length, and not by a constant factor."""
        lines = {"dapo"} if self.options.loss_type in ("grpo", "sapo") else {"grpo"}
        return [each for each in self.suspects.others if each.line in lines]

    def _plant_scores(self, ours: Gradient) -> dict[str, Apart]:
        planted = {"opposite sign": measure_apart({name: -grad for name, grad in ours.items()}, ours)}
        for suspect in self.suspects.scores:
            if suspect.name in CONTROLS and suspect.name not in planted:
                other = self._gradient_of(suspect)
                if other is not None:
                    planted[suspect.name] = measure_apart(other, ours)
        return planted

    def _gradient_of(self, suspect: Suspect) -> Gradient | None:
        if not suspect.when(self.rows, self.options):
            return None
        try:
            gradient = self.gradient(self.options, definition=suspect.replace(self.definition))
        except (OutOfMemory, ValueError):
            return None  # the suspect's own computation is impossible here: no row is left, or memory is
        return gradient if all(bool(grad.isfinite().all()) for grad in gradient.values()) else None

    def _choose(self, tried: Sequence[Fit], nothing: float) -> Explanation | None:
        """Return what to say of those that fit, or None where none does."""
        if not tried or tried[0].apart.distance > self.near or nothing - tried[0].apart.distance <= self.near:
            return None
        best = tried[0].apart.distance
        return _say([fit for fit in tried if fit.apart.distance - best <= self.near], "gradient")

    def _with_factor(self, tried: Sequence[Fit]) -> Explanation | None:
        """Return the explanation that a suspect's gradient is multiplied by a constant."""
        tried = sorted((fit for fit in tried if fit.apart.cosine > 0), key=lambda fit: _beside(fit.apart))
        if not tried or _beside(tried[0].apart) > self.near:
            return None
        fits = [fit for fit in tried if _beside(fit.apart) - _beside(tried[0].apart) <= self.near]
        return _say([dataclasses.replace(fit, factor=fit.apart.size) for fit in fits], "direction")


def _say(fits: Sequence[Fit], same: str) -> Explanation:
    """Return the explanation that some suspects fit, the best first: it is named where all are of its kind.

    Of two mistakes at once ("... and ...") and one of them alone the simpler is said: the other one does not show here.
    """
    names = {fit.name for fit in fits}
    fits = [fit for fit in fits if " and " not in fit.name or not any(part in fit.name for part in names - {fit.name})]
    if len({fit.name for fit in fits}) == 1:
        said = f"Named: {fits[0]}, whose {same} is the trainer's: {fits[0].apart}."
        return Explanation(fits[0].name, said, line=fits[0].line)
    listed = "; ".join(map(str, fits))
    return Explanation(None, f"{len(fits)} suspects have the trainer's {same}, so none is named: {listed}.")


def _nearest(tried: Sequence[Fit]) -> dict[str, Apart]:
    """Return the nearest fit of each name; they come in that order."""
    return {fit.name: fit.apart for fit in reversed(tried)}


def _beside(apart: Apart) -> float:
    """Return the distance that is left when the size is made right."""
    return math.sqrt(max(0.0, 1 - apart.cosine**2))
