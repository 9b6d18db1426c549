"""The weight that each row, and each place in the rows, was given: solved for, from the trainer's gradient.

With the scores s = log pi of the tokens, a loss of them has the gradient  sum of weight * ds / dtheta.  The derivatives
of the scores are known, and so is the trainer's gradient: the weights solve a linear system, with more equations
(elements of the gradient) than unknowns. What is left over, the rest, says whether weights explain the gradient at all:
it is large where the scores themselves are others. Two systems are solved: an unknown for each row, and one for each
kind of place (the first token, the last, the padding behind the end). Rows of the same tokens have one unknown, and
where derivatives depend on each other weights are NOT identifiable: only what the gradient determines is told.

Derivatives are taken by a few small tensors near the output, so that a backward pass ends early; the rest is that of a
whole pass with the solution.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from failurelab.textbook.apart import measure_apart
from failurelab.textbook.gradient import LOGITS_BYTES, Gradient, Precision, Step, Tally, forward_of, in_parts
from failurelab.textbook.rows import Row, Scoring
from failurelab.textbook.scores import Scores, plain, score

MOST, MOST_TOLD = 128, 12  # rows of other tokens that are solved for, and weights in a table
LARGE = 2**18  # elements of a tensor that derivatives are still taken by
EACH, SAMPLE = 64, 8192  # elements for each unknown, and of all that are looked at
DEPENDENT = 1e-5  # of the largest singular value, of unit columns: what is smaller is rounding
SHARED = 0.01  # of an unknown, squared, that lies in what is not determined
OFF, SAME = 0.05, 0.004  # of the root mean square of the expected weights: what differs, and what is the same
OWN = ("first token", "tokens between", "last token", "only token")
OTHERS = {  # and what it is called to train on them
    "the environment's tokens": "the environment's tokens are trained on",
    "first place behind the end": "padding is trained on",
    "other padding": "padding is trained on",
    "the prompt": "the prompt is trained on",
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A solved unknown.

    Attributes:
        name: `row 3`, or `rows 1, 4`, of the same tokens, whose weights add up; or one of OWN and OTHERS.
        expected: by the definition: of a row in advantages, of a place as a share of its row's weight.
        solved: what the trainer gave it.
        error: two standard errors of the solution; infinite where the gradient does not determine it.
        rows: numbers of the rows among those that are trained on, from 0; none of a place.
    """

    name: str
    expected: float
    solved: float
    error: float
    rows: tuple[int, ...] = ()

    @property
    def identifiable(self) -> bool:
        """Whether the gradient determines it."""
        return math.isfinite(self.error)

    def __str__(self) -> str:
        solved = f"{self.solved:+.3f} ± {self.error:.1g}" if self.identifiable else "NOT identifiable"
        return f"{self.name:28}{self.expected:+8.3f}  {solved}"


@dataclasses.dataclass(frozen=True)
class Solution:
    """Of one system.

    Attributes:
        weights: of rows, or of places.
        rest: norm of what they leave unexplained, by that of the trainer's gradient: of the better solution over all
            tensors, of the other over those that derivatives were taken by.
    """

    weights: tuple[Weight, ...]
    rest: float

    def same(self, one: float, other: float, error: float, off: float = OFF) -> bool:
        """Whether two weights are the same, within an error."""
        scale = math.sqrt(sum(each.expected**2 for each in self.weights) / len(self.weights))
        return abs(one - other) <= max(off * scale, 2 * error)

    @property
    def off(self) -> list[Weight]:
        """Those that are determined, and not what they should be."""
        known = [each for each in self.weights if each.identifiable]
        return [each for each in known if not self.same(each.solved, each.expected, each.error)]

    def __str__(self) -> str:
        unit = "advantage" if self.weights[0].rows else "share of the weight"
        told = [*self.off, *(each for each in self.weights if not each.identifiable)]
        lines = [f"{unit:28}expected  solved; {self.rest:.2g} of the gradient is left over"]
        lines += [*map(str, told[:MOST_TOLD]), *([f"and {len(told) - MOST_TOLD} more"] * (len(told) > MOST_TOLD))]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Unknown:
    """Rows or places, by the number of each row: the loss's slopes by its scores (tokens of the row,) at weight 1."""

    name: str
    expected: float
    slopes: Mapping[int, torch.Tensor]
    rows: tuple[int, ...] = ()


def solve(
    model: nn.Module,
    step: Step,
    tally: Tally,
    theirs: Gradient,
    precision: Precision,
    pad: int,
    add: Callable[[Callable[[], Gradient]], Gradient] = lambda work: work(),
) -> list[Solution]:
    """Return the solutions by rows and by places, that which leaves less first; none where there is nothing to solve.

    Args:
        model: the policy.
        step: of the definition.
        tally: of the definition's own pass, which has the loss's slopes by the scores.
        theirs: the trainer's gradient.
        precision: the numbers that the trainer computes in.
        pad: token id of the padding.
        add: over the processes that train together, what the rows of each give.
    """
    slopes = _whole_rows(step, tally)
    systems = [_of_rows(step, slopes), _of_places(step, slopes)]
    names = _near_the_output(theirs, EACH * sum(map(len, systems)))
    if not names or not 1 < len(systems[0]) <= MOST:
        return []
    scoring = Scoring(step.options.temperature, tokens="all", pad=pad)

    def run(names: Sequence[str], cotangents: Callable[[range, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """Return the derivatives of the scores, times each cotangent, by tensors: (cotangents, ...) each."""
        trained = {name: parameter for name, parameter in model.named_parameters() if name in names}
        with plain(model), torch.enable_grad():
            forward, leaves = forward_of(model, trained, precision)

            def work(part: range) -> list[torch.Tensor]:
                scores = score(forward, [step.rows[number] for number in part], scoring)
                return _pull_back(scores, [leaves[name] for name in names], cotangents(part, scores.logps), model)

            parts = [result for _, result in in_parts(model, step, work)]
        count = len(cotangents(range(0), torch.zeros(0, 1)))
        none = [theirs[name].new_zeros(count, *theirs[name].shape) for name in names]
        return [torch.stack(each).sum(0) for each in zip(*(parts or [none]))]

    def run_all(names: Sequence[str], cotangents: Callable[[range, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return list(add(lambda: dict(zip(names, run(names, cotangents)))).values())

    unknowns = [unknown for system in systems for unknown in system]
    grads = run_all(names, lambda part, logps: torch.stack([_spread(each.slopes, part, logps) for each in unknowns]))
    columns = torch.cat([grad.flatten(1) for grad in grads], 1).T.double().cpu()  # (elements, unknowns)
    target = torch.cat([theirs[name].flatten() for name in names]).double().cpu()
    every = max(1, len(target) // SAMPLE)
    columns, target, place, solutions = columns[::every], target[::every], 0, []
    for system in systems:
        own = columns[:, place : place + len(system)]  # (equations, unknowns of the system)
        place += len(system)
        values, errors = least_squares(own, target)
        solved = zip(system, values.tolist(), errors.tolist())
        weights = tuple(Weight(each.name, each.expected, value, error, each.rows) for each, value, error in solved)
        solutions.append((Solution(weights, float((own @ values - target).norm() / target.norm())), system))
    (best, system), (other, _) = sorted(solutions, key=lambda solution: solution[0].rest)
    total: dict[int, torch.Tensor] = {}
    for weight, unknown in zip(best.weights, system):
        for number, slope in unknown.slopes.items():
            total[number] = total.get(number, 0.0) + weight.solved * slope
    whole = run_all(list(theirs), lambda part, logps: _spread(total, part, logps)[None])
    rest = measure_apart(theirs, {name: grad[0].float() for name, grad in zip(theirs, whole)}).distance
    return [dataclasses.replace(best, rest=rest), other]


def least_squares(columns: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the solution (unknowns,) of columns (equations, unknowns) for a target (equations,), and its errors.

    An error is two standard errors, from what is left over; it is infinite where the columns do not determine an
    unknown.
    """
    sizes = columns.norm(dim=0)
    left, values, right = torch.linalg.svd(columns / sizes.clamp(min=1e-300), full_matrices=False)
    kept = values > DEPENDENT * values.max()
    inverse = torch.where(kept, 1 / values, 0.0)
    solution = right.T @ (inverse * (left.T @ target)) / sizes.clamp(min=1e-300)
    variance = (target - columns @ solution).square().sum() / max(1, len(target) - len(sizes))
    errors = 2 * (variance * (right * inverse[:, None]).square().sum(0)).sqrt() / sizes
    unknown = (right[~kept].square().sum(0) > SHARED) | (sizes == 0)
    return solution.masked_fill(unknown, 0.0) if unknown.all() else solution, errors.masked_fill(unknown, math.inf)


def _pull_back(
    scores: Scores, tensors: Sequence[torch.Tensor], cotangents: torch.Tensor, model: nn.Module
) -> list[torch.Tensor]:
    """Return derivatives of scores (rows, tokens) times cotangents (some, rows, tokens): (some, ...) by each tensor."""
    words = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    room = 4 * LOGITS_BYTES["cpu"] // (4 * words * max(1, scores.logps.numel()))
    found: list[list[torch.Tensor]] = [[] for _ in tensors]
    for some in cotangents.split(max(1, room)):
        grads: Sequence[torch.Tensor | None]
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an operation that has to be repeated for each
                grads = torch.autograd.grad(scores.logps, tensors, some, is_grads_batched=True, **options)
        except (RuntimeError, NotImplementedError):  # one that cannot be batched at all, such as a kernel's
            single = [torch.autograd.grad(scores.logps, tensors, each, **options) for each in some]
            grads = tuple(None if each[0] is None else torch.stack(list(each)) for each in zip(*single))
        for tensor, grad, parts in zip(tensors, grads, found):
            parts.append(tensor.new_zeros(len(some), *tensor.shape) if grad is None else grad)
    return [torch.cat(parts) for parts in found]


def _near_the_output(theirs: Gradient, wanted: int) -> list[str]:
    """Return the last tensors of the model, without large ones, until they have so many elements."""
    names: list[str] = []
    for name, grad in reversed(theirs.items()):
        if sum(theirs[each].numel() for each in names) >= wanted:
            break
        if grad.numel() <= LARGE and grad.any():
            names.append(name)
    while len(names) > 1 and sum(theirs[name].numel() for name in names[1:]) >= wanted:
        names.pop(0)  # norms: one of them may stand before the attention, which costs most of a backward pass
    return names


def _whole_rows(step: Step, tally: Tally) -> list[torch.Tensor]:
    """Return the loss's slopes by the scores of each row: of all its tokens but the first, and of its padding."""
    slopes = []
    for part in tally.slopes:
        for number, own in zip(part.part, part.slopes[0]):
            row = step.rows[number]
            whole = own.new_zeros(len(row.prompt) - 1 + max(row.padded[1], len(row.completion)))
            start, length = len(row.prompt) - 1, len(row.completion)
            whole[start : start + length] = own[:length]
            slopes.append(whole)
    return slopes


def _places(row: Row) -> dict[str, list[int]]:
    """Return where in a row's scores the tokens of each kind are."""
    start = len(row.prompt) - 1
    end, last = start + len(row.completion), start + max(row.padded[1], len(row.completion))
    own = [place for place in range(start, end) if place - start not in row.given]
    one = len(own) == 1
    first = {"first token": own[:1], "tokens between": own[1:-1], "last token": own[-1:]} if not one else {}
    padding = list(range(end, last))
    return {kind: first.get(kind, []) for kind in OWN} | {
        "only token": own * one,
        "the environment's tokens": [start + place for place in sorted(row.given)],
        "first place behind the end": padding[:1],
        "other padding": padding[1:],
        "the prompt": list(range(start)),
    }


def _own(places: Mapping[str, list[int]]) -> list[int]:
    return [place for kind in OWN for place in places[kind]]


def _of_rows(step: Step, slopes: Sequence[torch.Tensor]) -> list[_Unknown]:
    """Return an unknown for the rows of the same tokens, in advantages: what the tokens' scores are multiplied by."""
    numbers: dict[Any, list[int]] = {}
    for number, row in enumerate(step.rows):
        numbers.setdefault((row.prompt, row.completion, number if row.inputs else None), []).append(number)
    largest = max(float(own.abs().max()) for own in slopes)
    usual = float(step.weights[step.weights > 0].mean()) if (step.weights > 0).any() else 1.0
    unknowns = []
    for same in numbers.values():
        first = max(same, key=lambda number: len(slopes[number]))  # batches pad the same tokens to other lengths
        own, total = _own(_places(step.rows[first])), torch.zeros_like(slopes[first])
        for number in same:
            total[: len(slopes[number])] += slopes[number]
        mean = float(total[own].mean()) if own else 0.0
        coefficient = math.copysign(float(total[own].square().mean().sqrt()) if own else 0.0, mean)
        weight = float(step.weights[same].mean()) or usual
        unit = torch.zeros_like(total)
        unit[own] = -weight
        if abs(coefficient) > 1e-9 * largest:
            unit = total * (-weight / coefficient)
        name = f"row{'s' * (len(same) > 1)} {', '.join(str(number + 1) for number in same)}"
        expected = -coefficient / weight if abs(coefficient) > 1e-9 * largest else 0.0
        unknowns.append(_Unknown(name, expected, {first: unit}, tuple(same)))
    return unknowns


def _of_places(step: Step, slopes: Sequence[torch.Tensor]) -> list[_Unknown]:
    """Return an unknown for each kind of place; one that is not trained on would have the mean slope of its row."""
    unknowns, places = [], [_places(row) for row in step.rows]
    for kind in (*OWN, *OTHERS):
        parts = {}
        for number, (of, whole) in enumerate(zip(places, slopes)):
            parts[number] = torch.zeros_like(whole)
            if of[kind] and _own(of):
                parts[number][of[kind]] = whole[of[kind]] if kind in OWN else whole[_own(of)].mean()
        if any(part.any() for part in parts.values()):
            unknowns.append(_Unknown(kind, float(kind in OWN), parts))
    return unknowns


def _spread(slopes: Mapping[int, torch.Tensor], part: range, logps: torch.Tensor) -> torch.Tensor:
    """Return slopes by row as a tensor like the scores of some rows, (rows, tokens)."""
    spread = torch.zeros_like(logps)
    for place, number in enumerate(part):
        if number in slopes:
            spread[place, : len(slopes[number])] = slopes[number].to(logps)
    return spread


def say(solution: Solution, step: Step) -> tuple[str, str]:
    """Return what a solution says was done: a name, or "" where it is none that is known, and a line."""
    return _say_rows(solution, step) if solution.weights[0].rows else _say_places(solution)


def _say_rows(solution: Solution, step: Step) -> tuple[str, str]:
    rows, worth = step.rows, dict(enumerate(step.advantages.tolist()))
    known = [each for each in solution.weights if each.identifiable]
    off = solution.off

    def holds(values: Mapping[Weight, float]) -> bool:
        return all(solution.same(each.solved, values[each], each.error) for each in known)

    cuts: dict[str, Callable[[float], float]] = {
        "only those above 0 count": lambda value: max(value, 0.0),
        "only those below 0 count": lambda value: min(value, 0.0),
        "their sign is lost": abs,
    }
    for line, cut in cuts.items():
        if holds({each: cut(each.expected) for each in known}):
            return "advantages cut", f"of the advantages, {line}"
    target = torch.tensor([each.solved for each in known], dtype=torch.float64)
    for name, of, keys in (
        ("accumulation", "micro-batch", [row.micro for row in rows]),
        ("scaling of the rewards", "group", [(row.batch, row.group) for row in rows]),
    ):
        kinds = list(dict.fromkeys(keys))
        parts = torch.tensor([[sum(worth[n] for n in each.rows if keys[n] == key) for key in kinds] for each in known])
        factors, _ = least_squares(parts.double(), target)
        close = dict(zip(known, (parts.double() @ factors).tolist()))
        if len(known) >= 2 * len(kinds) > 2 and holds(close):
            if of == "micro-batch" and (dropped := _dropped(rows, kinds, factors.tolist())):
                return "one rank's batch dropped", dropped
            if of == "group" and step.definition.together > 1:  # a term's rows, whose weights depend on each other
                name = ""
            return name, f"the rows of each {of} have their weight times {_list(f'{factor:.3g}' for factor in factors)}"
    single = [each for each in off if len(each.rows) == 1]
    near = max(SAME, 2 * solution.rest)
    # Rows that keep their own weight give it to no other: where rewards take few values, any weight is some row's.
    kept = {number for each in known if each not in off and len(each.rows) == 1 for number in each.rows}
    left, sources = [number for number in worth if number not in kept], list[int]()
    for each in single:
        source = min(left, key=lambda number: abs(worth[number] - each.solved))
        if not solution.same(worth[source], each.solved, each.error, near):
            break
        left.remove(source)
        sources.append(source)
    if len(single) > 1 and len(sources) == len(single):
        told = _list(each.name for each in single), _list(f"row {number + 1}" for number in sources)
        return "other rows' advantages", "rows {} were given the weights of rows {}".format(*told)
    return "", f"rows have other weights: {_table(off)}"


def _dropped(rows: Sequence[Row], micros: Sequence[Any], factors: Sequence[float]) -> str:
    """Return which ranks' micro-batches have no weight, where all others have theirs; "" where it is not so."""
    ranks: dict[Any, int] = {row.micro: row.rank for row in rows}
    lost = [micro for micro, factor in zip(micros, factors) if abs(factor) < OFF]
    whole = all(abs(factor - 1) < OFF for factor in factors if abs(factor) >= OFF)
    if len(set(ranks.values())) < 2 or not lost or not whole:
        return ""
    own = [
        f"{sorted(m for m in ranks if ranks[m] == ranks[micro]).index(micro) + 1} of rank {ranks[micro]}"
        for micro in lost
    ]
    return f"micro-batch {_list(own)} has no weight"


def _say_places(solution: Solution) -> tuple[str, str]:
    known = {each.name: each for each in solution.weights if each.identifiable}
    usual = max((known[name].solved for name in OWN if name in known), key=abs, default=1.0)

    def near(name: str, value: float) -> bool:
        return abs(known[name].solved - value) <= max(OFF * abs(usual), 2 * known[name].error)

    lost = [name for name in OWN if name in known and name != "only token" and near(name, 0.0)]
    extra = [name for name in OTHERS if name in known and near(name, usual)]
    rest = {name: usual for name in OWN if name != "only token"} | dict.fromkeys(OTHERS, 0.0)
    name = f"{lost[0]} left out" if len(lost) == 1 and not extra else ""
    if not lost and len({OTHERS[place] for place in extra}) == 1:
        name = OTHERS[extra[0]]
    if not all(near(place, value) for place, value in rest.items() if place in known and place not in lost + extra):
        name = ""
    return name, f"places have other weights: {_table(solution.off)}"


def _table(weights: Sequence[Weight]) -> str:
    told = [
        f"{each.name} {each.solved:+.2f} ± {each.error:.1g} where {each.expected:+.2f} is right" for each in weights
    ]
    return "; ".join(told[:4]) + (f"; and {len(told) - 4} more" if len(told) > 4 else "")


def _list(words: Any) -> str:
    told = [str(word).removeprefix("row ") for word in words]
    return ", ".join(told[:6]) + (f" and {len(told) - 6} more" if len(told) > 6 else "")
