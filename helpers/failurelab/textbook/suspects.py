"""Which suspect explains a gradient that is wrong: the expected gradient again, with one thing done otherwise.

A suspect is named where its gradient is the trainer's within the floor, and nearer than that of the definition and of
every other suspect by more than the floor. Where several fit, all are listed and none is named. Four rounds, and a
later one only where the one before found nothing:

1. other scores of the right tokens,
2. any other suspect as it is,
3. the definition, the opposite sign, or a suspect, times a constant factor,
4. the right scores of the right tokens, with other weights of the completions.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from failurelab.textbook.advantages import advantages
from failurelab.textbook.fields import Options
from failurelab.textbook.gradient import Change, Gradient, OutOfMemory, expected_gradient
from failurelab.textbook.measure import NAMES, Apart, Floor, measure_apart, norm
from failurelab.textbook.recorder import pad_id
from failurelab.textbook.rows import Row
from failurelab.textbook.scores import Scoring

MIXED = 0.9  # of the correlation with the advantages: below it rows have those of others
MOST_ROWS, SAMPLE = 128, 20_000  # of the last round: one pass for each row, and elements of the gradient for each
CONTROLS = ("scores shifted by one", "rows of the prompt", "no attention mask", "temperature")
_OTHER_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclasses.dataclass(frozen=True)
class Suspicion:
    """A suspect that fits, or comes near.

    Attributes:
        name: of the kind of mistake.
        detail: which one of the kind.
        apart: the trainer's gradient and the suspect's.
        factor: that the suspect's gradient is multiplied by.
    """

    name: str
    detail: str
    apart: Apart
    factor: float = 1.0

    def __str__(self) -> str:
        factor = "" if self.factor == 1 else f", times {self.factor:.3g}"
        return f"{self.name}{f' ({self.detail})' if self.detail else ''}{factor}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the search has found: the name of the suspect that explains the gradient, or None, and a line."""

    named: str | None = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A mistake: its kind, which one, and the options or the change that it amounts to."""

    name: str
    detail: str
    options: Options
    change: Change = Change()  # noqa: RUF009


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for what explains one gradient.

    Attributes:
        trainer: whose gradient is wrong.
        model: its policy, unwrapped.
        rows: of the step.
        options: of the definition.
        theirs: the trainer's gradient.
        floor: of the measurement.
        gradient: gives the expected gradient for options and a change.
    """

    trainer: Any
    model: nn.Module
    rows: Sequence[Row]
    options: Options
    theirs: Gradient
    floor: Floor
    gradient: Callable[..., Gradient]

    @property
    def near(self) -> float:
        """How near a suspect must come; where right gradients lie farther apart, many a one comes as near by chance."""
        return min(self.floor.near, NAMES)

    def explain(self, ours: Gradient, apart: Apart) -> Finding:
        """Return the suspect that explains the trainer's gradient.

        Args:
            ours: the expected gradient.
            apart: the trainer's and this one.
        """
        if not norm(self.theirs):
            return Finding("no gradient", "Named: no gradient, in any of the tensors.")
        missing = self._missing_tensors(ours)
        if missing is not None:
            return Finding(missing.name, f"Named: {missing}.")
        pad, asked = pad_id(self.trainer), int(self.trainer.args.gradient_accumulation_steps)
        tried = self._try(_of_scores(self.rows, self.options, pad), ours)
        finding = self._choose(tried, apart.distance)
        # with old log-probabilities other scores move the ratios, and so clip as a mistake of another kind does
        if finding is None or any(row.old_logps is not None for row in self.rows):
            others = _others(self.rows, self.options, pad, asked)
            tried += [self._same(ours, "opposite sign", -1.0), *self._try(others, ours)]
            tried.sort(key=lambda each: each.apart.distance)
            finding = self._choose(tried, apart.distance)
        finding = finding or self._with_factor(apart, tried) or self._other_weights()
        if finding is not None:
            return finding
        nearest = tried[0]
        return Finding(None, f"None of {len(tried)} suspects explains it; the nearest: {nearest}, {nearest.apart}.")

    def _try(self, some: Iterator[Suspect], ours: Gradient) -> list[Suspicion]:
        """Return what would make another gradient than the definition's, `ours`, the nearest first."""
        tried = []
        for suspect in some:
            other = self._gradient_of(suspect)
            if other is not None and measure_apart(other, ours).distance > self.near:
                tried.append(Suspicion(suspect.name, suspect.detail, measure_apart(self.theirs, other)))
        return sorted(tried, key=lambda each: each.apart.distance)

    def plant(self, ours: Gradient) -> dict[str, Apart]:
        """Return how far planted mistakes lie from the definition's gradient, `ours`: the first of each of CONTROLS."""
        planted = {"opposite sign": measure_apart({name: -grad for name, grad in ours.items()}, ours)}
        for suspect in _of_scores(self.rows, self.options, pad_id(self.trainer)):
            if suspect.name in CONTROLS and suspect.name not in planted:
                other = self._gradient_of(suspect)
                if other is not None:
                    planted[suspect.name] = measure_apart(other, ours)
        return planted

    def _gradient_of(self, suspect: Suspect) -> Gradient | None:
        try:
            gradient = self.gradient(suspect.options, change=suspect.change)
        except (OutOfMemory, ValueError):
            return None  # the suspect's own computation is impossible here: no row is left, or memory is
        return gradient if all(bool(grad.isfinite().all()) for grad in gradient.values()) else None

    def _same(self, gradient: Gradient, name: str, factor: float) -> Suspicion:
        return Suspicion(name, "", measure_apart(self.theirs, {key: factor * grad for key, grad in gradient.items()}))

    def _missing_tensors(self, ours: Gradient) -> Suspicion | None:
        """Return the suspicion that some tensors have no gradient, where all others have the right one."""
        empty = [name for name, grad in self.theirs.items() if not grad.any() and ours[name].any()]
        rest = {name: grad for name, grad in ours.items() if name not in empty and grad.any()}
        if not empty or not rest:
            return None
        apart = measure_apart({name: self.theirs[name] for name in rest}, rest)
        if not self.floor.holds(apart):
            return None
        return Suspicion("tensors without gradient", f"{len(empty)} of {len(ours)}, {empty[0]} first", apart)

    def _choose(self, tried: Sequence[Suspicion], nothing: float) -> Finding | None:
        """Return what to say of those that fit, or None where none does."""
        near = self.near
        if not tried:
            return None
        best = tried[0]
        if best.apart.distance > near or nothing - best.apart.distance <= near:
            return None
        return _say([each for each in tried if each.apart.distance - best.apart.distance <= near], "gradient")

    def _with_factor(self, nothing: Apart, tried: Sequence[Suspicion]) -> Finding | None:
        """Return the finding that a suspect's gradient, or the definition's, is multiplied by a constant."""
        near = self.near
        tried = sorted((each for each in tried if each.apart.cosine > 0), key=lambda each: _beside(each.apart))
        simple = [each for each in tried if each.name == "opposite sign"]
        if nothing.cosine > 0:
            simple.insert(0, Suspicion("constant factor", "", nothing))
        fits = [each for each in simple if _beside(each.apart) <= near][:1]
        if not fits and tried and _beside(tried[0].apart) <= near:
            fits = [each for each in tried if _beside(each.apart) - _beside(tried[0].apart) <= near]
        return _say([dataclasses.replace(each, factor=each.apart.size) for each in fits], "direction") if fits else None

    def _other_weights(self) -> Finding | None:
        """Return the finding that the right scores have other weights: the weights are solved for.

        With ratios of 1 and without a KL term the gradient is a sum over completions of advantage times the gradient
        of their log-probabilities. Solving for the advantages leaves a rest where anything else is wrong.
        """
        options = dataclasses.replace(self.options, entropy_coef=0.0, mask_truncated_completions=False)
        chosen = [row for row in self.rows if row.micro is not None]
        kinds = list({(row.prompt, row.completion): row for row in chosen}.values())
        if (
            options.beta
            or options.top_entropy_quantile < 1
            or any(row.old_logps is not None for row in chosen)
            or len(kinds) > MOST_ROWS
        ):
            return None
        worth = advantages(self.rows, self.options)
        expected = {id(row): float(value) for row, value in zip(self.rows, worth)}
        places = _sample(self.theirs)
        one = Change(advantages=lambda rows, options, worth: torch.ones_like(worth))
        alone = [dataclasses.replace(row, old_logps=None) for row in kinds]
        columns = []
        for row in alone:
            grad = expected_gradient(self.model, [row], dataclasses.replace(options, loss_type="luspo"), change=one)
            columns.append(_take(grad, places))
        matrix, target = torch.stack(columns, 1).double(), _take(self.theirs, places).double()  # (elements, kinds)
        solved = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd" if matrix.device.type == "cpu" else None)
        weights = solved.solution[:, 0]  # (kinds,)
        rest = float((matrix @ weights - target).norm() / target.norm())
        if rest > self.near or len(kinds) < 2 or len(target) < 4 * len(kinds):
            return None
        sums = torch.zeros(len(kinds), dtype=torch.float64)
        number = {(row.prompt, row.completion): place for place, row in enumerate(kinds)}
        for row in chosen:
            sums[number[row.prompt, row.completion]] += expected[id(row)]
        like = float(torch.corrcoef(torch.stack([weights.cpu(), sums]))[0, 1])
        suspicion = Suspicion(
            "other rows' advantages" if abs(like) < MIXED else "advantages, each times another factor",
            f"right scores of the right tokens, with other weights: correlation with the advantages {like:+.2f}",
            Apart(math.sqrt(max(0.0, 1 - rest**2)), 1.0, rest),
        )
        return Finding(suspicion.name, f"Named: {suspicion}; the rest is {rest:.2g} of the gradient.")


def _say(fits: Sequence[Suspicion], same: str) -> Finding:
    """Return the finding that some suspects fit, the best first: it is named where all are of its kind."""
    if len({each.name for each in fits}) == 1:
        return Finding(fits[0].name, f"Named: {fits[0]}, whose {same} is the trainer's: {fits[0].apart}.")
    listed = "; ".join(map(str, fits))
    return Finding(None, f"{len(fits)} suspects have the trainer's {same}, so none is named: {listed}.")


def _others(rows: Sequence[Row], options: Options, pad: int, accumulated: int) -> Iterator[Suspect]:
    """Yield the suspects of all but the scores; `accumulated` micro-batches were asked for."""
    yield from _of_masks(rows, options, pad)
    yield from _of_advantages(rows, options)
    yield from _of_rewards(rows, options)
    yield from _of_loss(rows, options, accumulated)
    yield from _of_policy(rows, options)


def _of_scores(rows: Sequence[Row], options: Options, pad: int) -> Iterator[Suspect]:
    def suspect(name: str, detail: str = "", **otherwise: Any) -> Suspect:
        scoring = Scoring(**{"temperature": options.temperature, "pad": pad} | otherwise)
        return Suspect(name, detail, options, Change(scoring))

    yield suspect("scores shifted by one", "a token is scored after it was read", shift=1)
    yield suspect("scores shifted by one", "a token is scored one place early", shift=-1)
    yield suspect("rows of the prompt", from_prompt=True)
    yield suspect("rows of the prompt", "padded", from_prompt=True, padded=True)
    unmasked: dict[str, Any] = {"padded": True, "attend_padding": True}
    yield suspect("rows of the prompt", "without attention mask", from_prompt=True, **unmasked)
    if any(len(row.prompt) < row.padded[0] for row in rows):
        yield suspect("no attention mask", **unmasked)
        if options.temperature != 1:
            yield suspect("no attention mask and no temperature", temperature=1.0, **unmasked)
    if options.temperature != 1:
        yield suspect("temperature", "left out", temperature=1.0)
        yield suspect("temperature", "multiplied", temperature=1 / options.temperature)
        yield suspect("temperature", "divided by twice", temperature=options.temperature**2)


def _of_masks(rows: Sequence[Row], options: Options, pad: int) -> Iterator[Suspect]:
    at = Scoring(options.temperature, pad=pad)
    masks = {
        "rolled": ("mask shifted", "by one to the right", lambda row: row.length()),
        "rolled back": ("mask shifted", "by one to the left", lambda row: row.length()),
        "no first": ("first token left out", "", lambda row: row.length() - 1),
        "no last": ("last token left out", "", lambda row: row.length() - 1),
        "padding": ("padding is trained on", "", lambda row: max(row.padded[1], len(row.completion)) - len(row.given)),
        "prompt": ("the prompt is trained on", "", lambda row: len(row.prompt) + row.length() - 1),
    }
    if any(row.given for row in rows):
        scoring, name = dataclasses.replace(at, environment=True), "the environment's tokens are trained on"
        yield Suspect(name, "", options, Change(scoring))
        yield Suspect(name, "divided by its tokens", options, Change(scoring, lengths=lambda row: len(row.completion)))
    for tokens, (name, detail, length) in masks.items():
        for attends in (False, True) if tokens != "prompt" else (False,):
            scoring = dataclasses.replace(at, tokens=tokens, mask_attends=attends)
            yield Suspect(name, detail, options, Change(scoring=scoring))
            yield Suspect(
                name, f"{detail}, divided by its tokens".strip(", "), options, Change(scoring, lengths=length)
            )


def _of_advantages(rows: Sequence[Row], options: Options) -> Iterator[Suspect]:
    def suspect(name: str, detail: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Suspect:
        return Suspect(name, detail, options, Change(advantages=lambda rows, options, worth: function(worth)))

    yield suspect("opposite sign", "of the advantages", torch.neg)
    for kind in ("group", "batch", "none"):
        if kind != options.scale_rewards and options.multi_objective_aggregation == "sum_then_normalize":
            yield Suspect("scaling of the rewards", kind, dataclasses.replace(options, scale_rewards=kind))
    for small in (1e4, 1e3, 1e2, 10.0, 1.0, 0.1):
        change = _with_advantages(advantages(rows, options, small))
        yield Suspect("number added to the standard deviation", f"{small:g} in place of 1e-4", options, change)
    yield Suspect("standard deviation", "divided by n in place of n - 1", options, Change(advantages=_biased))
    by_sum = dataclasses.replace(options, multi_objective_aggregation="sum_then_normalize")
    for detail, scale in {
        "the group's mean is not subtracted": options.scale_rewards,
        "nor is the deviation divided by": "none",
    }.items():
        raw = advantages(rows, dataclasses.replace(by_sum, scale_rewards=scale), baseline=False)
        yield Suspect("no baseline", detail, options, _with_advantages(raw))
    yield Suspect("groups", "the mean and the deviation are those of the batch", options, Change(advantages=_one_group))
    yield Suspect("groups", "interleaved: row i is taken for group i mod n", options, Change(advantages=_interleaved))
    for detail, function in _orders(rows).items():
        yield suspect("other rows' advantages", detail, function)
    yield suspect("advantages cut", "only those above 0", lambda worth: worth.clamp(min=0))
    yield suspect("advantages cut", "only those below 0", lambda worth: worth.clamp(max=0))
    yield suspect("advantages cut", "to between -1 and 1", lambda worth: worth.clamp(-1, 1))
    yield suspect("advantages cut", "only their sign counts", torch.sign)
    yield suspect("advantages without sign", "", torch.abs)


def _orders(rows: Sequence[Row]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return orders in which the advantages of other rows may be taken."""
    size = sum(row.group == rows[0].group and row.batch == rows[0].batch for row in rows)
    orders: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "one row on": lambda worth: worth.roll(1),
        "one row back": lambda worth: worth.roll(-1),
        "in reverse order": lambda worth: worth.flip(0),
    }
    if len(rows) % size == 0 and len(rows) > size:
        orders["one group on"] = lambda worth: worth.roll(size)
        orders["one group back"] = lambda worth: worth.roll(-size)
        orders["rows and groups transposed"] = lambda worth: worth.view(-1, size).T.reshape(-1)
        orders["in reverse order within groups"] = lambda worth: worth.view(-1, size).flip(1).reshape(-1)
    orders["one row on within groups"] = lambda worth: (
        worth.view(-1, size).roll(1, 1).reshape(-1) if len(worth) % size == 0 else worth
    )
    return orders


def _biased(rows: Sequence[Row], options: Options, worth: torch.Tensor) -> torch.Tensor:
    sizes = collections.Counter((row.batch, row.group) for row in rows)
    counts = torch.tensor([sizes[row.batch, row.group] for row in rows], dtype=worth.dtype)
    if options.scale_rewards == "batch":
        counts = torch.full_like(counts, len(rows))
    return worth * (counts / (counts - 1).clamp(min=1)).sqrt() if options.scale_rewards != "none" else worth


def _one_group(rows: Sequence[Row], options: Options, worth: torch.Tensor) -> torch.Tensor:
    return advantages([dataclasses.replace(row, group=0) for row in rows], options)


def _interleaved(rows: Sequence[Row], options: Options, worth: torch.Tensor) -> torch.Tensor:
    groups = len({(row.batch, row.group) for row in rows})
    return advantages([dataclasses.replace(row, group=place % groups) for place, row in enumerate(rows)], options)


def _of_rewards(rows: Sequence[Row], options: Options) -> Iterator[Suspect]:
    count = len(rows[0].rewards)

    def weighted(name: str, detail: str, weights: Sequence[float]) -> Suspect:
        return Suspect(name, detail, dataclasses.replace(options, reward_weights=tuple(weights)))

    given = options.reward_weights or (1.0,) * count
    if set(given) != {1.0}:
        yield weighted("weights of the reward functions", "left out", (1.0,) * count)
    if 1 < count <= 4:
        for other in sorted(set(itertools.permutations(given)) - {given}):
            yield weighted("weights of the reward functions", f"in another order: {list(other)}", other)
    if count > 1:
        tells = [len({row.rewards[index] for row in rows}) > 1 for index in range(count)]
        for index in range(count):
            yield weighted("one reward function ignored", f"number {index + 1}", _with(given, index, 0.0))
            if any(_with(tells, index, False)):  # alone, it is the opposite sign of all
                yield weighted("sign of one reward function", f"number {index + 1}", _with(given, index, -given[index]))
        (way,) = {"normalize_then_sum", "sum_then_normalize"} - {options.multi_objective_aggregation}
        yield Suspect("how rewards become one", way, dataclasses.replace(options, multi_objective_aggregation=way))
    if any(all(value is None or math.isnan(value) for value in row.rewards) for row in rows):
        yield Suspect(
            "completions without any reward", "count as 0", dataclasses.replace(options, unscored_are_zero=True)
        )
    changes: dict[str, Callable[[float], float]] = {
        "cut to between 0 and 1": lambda v: min(max(v, 0.0), 1.0),
        "rounded": round,
        "cut to whole numbers": int,
    }
    for name, function in changes.items():
        changed = [dataclasses.replace(row, rewards=_changed(row.rewards, function)) for row in rows]
        if any(one.rewards != other.rewards for one, other in zip(changed, rows)):
            yield Suspect("rewards changed", name, options, _with_advantages(advantages(changed, options)))


def _with_advantages(worth: torch.Tensor) -> Change:
    return Change(advantages=lambda rows, options, old: worth)


def _with(values: Sequence[float], index: int, value: float) -> list[float]:
    return [value if place == index else each for place, each in enumerate(values)]


def _changed(rewards: Sequence[float | None], function: Callable[[float], float]) -> tuple[float | None, ...]:
    return tuple(each if each is None or not math.isfinite(each) else float(function(each)) for each in rewards)


def _of_loss(rows: Sequence[Row], options: Options, accumulated: int) -> Iterator[Suspect]:
    for kind in _OTHER_LOSSES:
        if kind != options.loss_type and (kind != "dr_grpo" or options.max_completion_length):
            yield Suspect("loss_type", kind, dataclasses.replace(options, loss_type=kind))
    toggled = dataclasses.replace(options, mask_truncated_completions=not options.mask_truncated_completions)
    if not all(row.ended for row in rows):
        detail = "cut completions are left out" if toggled.mask_truncated_completions else "cut ones are trained on"
        yield Suspect("mask_truncated_completions", detail, toggled)
    micros = sorted({row.micro for row in rows if row.micro is not None})
    count = len(micros)
    waiting = sum(row.length() for row in rows if row.micro is None)
    of_generation = waiting and options.loss_type in ("dapo", "cispo")
    if of_generation:
        trained = sum(row.length() for row in rows if row.micro is not None)
        share = trained / (trained + waiting)
        own = dataclasses.replace(options, generation_tokens=False)
        yield _weighed(own, "divided by the tokens of the generation", "", lambda rows, weights: weights * share)
    if count < accumulated:
        detail = f"{count} micro-batches, the rest of an epoch, are divided by {accumulated}"
        yield _weighed(options, "accumulation", detail, lambda rows, weights: weights * count / accumulated)
    if count > 1:
        yield _weighed(options, "accumulation", "micro-batches are added", lambda rows, weights: weights * count)
        if not of_generation:  # it divides by as much, where each step of the generation is alike
            yield _weighed(options, "accumulation", "divided twice", lambda rows, weights: weights / count)
        for micro, detail in ((micros[-1], "only the last micro-batch"), (micros[0], "only the first micro-batch")):
            yield _weighed(options, "accumulation", detail, _only(micro, 1.0))
            yield _weighed(options, "accumulation", f"{detail}, not divided", _only(micro, float(count)))
        if count > 2:
            yield _weighed(options, "accumulation", "the last micro-batch is left out", _all_but(micros[-1]))
            yield _weighed(options, "accumulation", "the first micro-batch is left out", _all_but(micros[0]))
        if options.loss_type == "dapo":
            local = dataclasses.replace(options, loss_type="bnpo")
            yield _weighed(
                local, "accumulation", "each divided by its own tokens", lambda rows, weights: weights * count
            )


def _weighed(options: Options, name: str, detail: str, function: Callable[..., torch.Tensor]) -> Suspect:
    return Suspect(name, detail, options, Change(weights=function))


def _only(micro: int, factor: float) -> Callable[[Sequence[Row], torch.Tensor], torch.Tensor]:
    def keep(rows: Sequence[Row], weights: torch.Tensor) -> torch.Tensor:
        return weights * torch.tensor([factor * (row.micro == micro) for row in rows], dtype=weights.dtype)

    return keep


def _all_but(micro: int) -> Callable[[Sequence[Row], torch.Tensor], torch.Tensor]:
    def keep(rows: Sequence[Row], weights: torch.Tensor) -> torch.Tensor:
        return weights * torch.tensor([float(row.micro != micro) for row in rows], dtype=weights.dtype)

    return keep


def _of_policy(rows: Sequence[Row], options: Options) -> Iterator[Suspect]:
    def given(name: str, detail: str, **others: Any) -> Suspect:
        return Suspect(name, detail, dataclasses.replace(options, **others))

    yield Suspect("probabilities in place of log-probabilities", "", options, Change(probabilities=True))
    if options.beta:
        yield given("KL divergence", "left out", beta=0.0)
        yield given("KL divergence", "opposite sign", beta=-options.beta)
        for kind in ("k1", "k2", "reversed"):
            yield Suspect("KL divergence", f"estimated as {kind}", options, Change(kl=kind))
        other = not options.use_bias_correction_kl
        yield given("KL divergence", "use_bias_correction_kl", use_bias_correction_kl=other)
    if options.entropy_coef:
        yield given("entropy", "left out", entropy_coef=0.0)
        yield given("entropy", "opposite sign", entropy_coef=-options.entropy_coef)
    if options.top_entropy_quantile < 1:
        yield given("top_entropy_quantile", "left out", top_entropy_quantile=1.0)
    if options.importance_sampling_level == "sequence":
        detail = "the log-ratio of a sequence is not divided by its length"
        yield Suspect("importance_sampling_level", detail, options, Change(ratio="summed"))
    if all(row.old_logps is None for row in rows):
        return
    yield Suspect("ratio", "always 1", options, Change(ratio="one"))
    yield Suspect("ratio", "upside down", options, Change(ratio="inverted"))
    yield Suspect("clipping", "also where it does not bind", options, Change(no_minimum=True))
    if options.epsilon is not None:
        high = options.epsilon if options.epsilon_high is None else options.epsilon_high
        yield given("clipping", "left out", epsilon=1e9, epsilon_high=1e9)
        if high != options.epsilon:
            yield given("clipping", "epsilon_high is not used", epsilon_high=None)
            yield given("clipping", "epsilon and epsilon_high swapped", epsilon=high, epsilon_high=options.epsilon)
    if options.delta is not None:
        yield given("clipping", "delta is not used", delta=None)
    level = "token" if options.importance_sampling_level == "sequence" else "sequence"
    yield given("importance_sampling_level", level, importance_sampling_level=level)


def _beside(apart: Apart) -> float:
    """Return the distance that is left when the size is made right."""
    return math.sqrt(max(0.0, 1 - apart.cosine**2))


def _sample(gradient: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return places of elements of each tensor, evenly spaced, SAMPLE over all."""
    total = sum(grad.numel() for grad in gradient.values())
    every = max(1, total // SAMPLE)
    return {name: torch.arange(0, grad.numel(), every, device=grad.device) for name, grad in gradient.items()}


def _take(gradient: Mapping[str, torch.Tensor], places: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient[name].reshape(-1)[where] for name, where in places.items()])
