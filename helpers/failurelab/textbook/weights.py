"""The weight that each row was given, beside the one that it should have.

`reading` has the loss's derivative by the log-probability of each token, and a pass of the definition has those that it
should be. Where they differ by one factor for each rank, micro-batch or row, that is said; of rows in advantages, what
the tokens' log-probabilities are multiplied by.
"""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from failurelab.textbook.apart import Apart, norm
from failurelab.textbook.definition import Definition
from failurelab.textbook.gradient import Step, Tally
from failurelab.textbook.reading import Pass
from failurelab.textbook.rows import Row, strip_padding

Weights = dict[str, torch.Tensor]  # of a row's completion and its padding (tokens,), by the row's number
MOST_TOLD = 12
OFF = 0.05  # of the root mean square of the expected weights: what differs
NEARBY = 0.03  # of the norm of all weights: what is the same, in numbers of 16 bits too
WRONG_TOKENS = 0.05  # share of the tokens from which on others are scored than the definition's


@dataclasses.dataclass(frozen=True)
class Weight:
    """What a row was given.

    Attributes:
        name: such as `row 3`.
        expected: its advantage, by the definition.
        given: what the trainer gave it.
    """

    name: str
    expected: float
    given: float

    def __str__(self) -> str:
        return f"{self.name:28}{self.expected:+8.3f}  {self.given:+.3f}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What explains the gradient: the name, or None, and its line; a text; suspects beside it, and weights of rows."""

    named: str | None = None
    text: str = ""
    line: str = ""
    tried: Mapping[str, Apart] = dataclasses.field(default_factory=dict)
    weights: tuple[Weight, ...] = ()


def slopes_of(definition: Definition, step: Step, tally: Tally, rows: Sequence[Row]) -> Weights:
    """Return the weights by a definition, at the scores that a pass left in `tally`; no model is asked."""
    options, slopes = step.options, Weights()
    own = Step(rows, options, definition)
    for part in tally.slopes:
        made, leaf = types.SimpleNamespace(**part.given), part.scores[0].detach().requires_grad_()
        places = list(part.part)
        made.logps, made.worth = leaf, own.advantages[places].to(leaf)[:, None]
        made.weights = own.weights[places].to(leaf)[:, None]
        if definition.quantile(options) == 1:
            made.chosen = torch.ones_like(made.chosen)
        with torch.enable_grad():
            loss = definition.loss(made, options)
        found = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
        for number, row in zip(places, torch.zeros_like(leaf) if found is None else found):
            length = len(step.rows[number].completion)
            whole = row.new_zeros(max(step.rows[number].padded[1], length)).double().cpu()
            whole[:length] = row[:length].double().cpu()
            slopes[str(number)] = whole
    return slopes


def _alike(step: Step) -> dict[int, list[int]]:
    """Return for each row the rows of its rank with the same tokens, of which it is not known which is which."""
    same: dict[Any, list[int]] = {}
    for number, row in enumerate(step.rows):
        same.setdefault((row.rank, row.prompt, row.completion), []).append(number)
    return {number: numbers for numbers in same.values() for number in numbers}


def merged(weights: Weights, step: Step) -> Weights:
    """Return weights, of rows of the same tokens the mean; micro-batches may pad these to other lengths."""
    means, alike = Weights(), _alike(step)
    for number in range(len(step.rows)):
        numbers = alike[number]
        same = torch.nn.utils.rnn.pad_sequence([weights[str(other)] for other in numbers], batch_first=True)
        means[str(number)] = same.mean(0)[: len(weights[str(number)])]
    return means


def read_rows(passes: Sequence[Pass], step: Step, pad: int, scale: float = 1.0) -> Weights | None:
    """Return the weights of this process's rows, as they were read; None where they are not all known.

    Args:
        passes: of the loss.
        step: with the rows.
        pad: token id of the padding.
        scale: that weights are divided by, as those of a scaled loss.
    """
    left: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    micros = sorted({step.rows[number].micro or 0 for number in step.own})  # of this rank: passes count them from 0
    for number in step.own:
        row = step.rows[number]
        turn, ids = micros.index(row.micro or 0), strip_padding(row.prompt + row.completion, pad)[1]
        left.setdefault((turn, ids), []).append(number)
    weights, other, total = Weights(), 0, 0
    for made in passes:
        for trained in made.rows:
            start, bare = strip_padding(trained.padded, pad)
            numbers = left.get((trained.micro, bare))
            if not numbers:
                return None  # other ids than were drawn, or more often
            number = numbers.pop(0)
            row = step.rows[number]
            whole = row.prompt + row.completion
            first = start - strip_padding(whole, pad)[0] + len(row.prompt)  # place of the completion among the ids
            own = torch.zeros(max(row.padded[1], len(row.completion)), dtype=torch.float64)
            for each in trained.tokens:
                place = each.at + 1 - first
                total += 1
                right = row.completion[place] if 0 <= place < len(row.completion) else pad
                if not 0 <= place < len(own) or each.token != right:
                    other += 1
                    continue
                own[place] = each.weight / scale
            weights[str(number)] = own
    return None if any(left.values()) or other > WRONG_TOKENS * total else weights


def settle(read: Weights, slopes: Weights) -> Weights:
    """Return weights with what could not be read, of tokens that the policy is sure of, as it should be."""
    return {name: torch.where(own.isnan(), slopes[name], own) for name, own in read.items()}


def explain_weights(read: Weights, slopes: Weights, step: Step, near: float = NEARBY) -> Explanation | None:
    """Return what weights differ by from those that they should be; None where it is not known.

    Args:
        read: of all rows.
        slopes: those that they should be.
        step: with the rows.
        near: what may be left over, of the norm of all.
    """
    factors = factors_of(read, slopes, [row.micro for row in step.rows], step, near)
    if 2 < 2 * len(factors) <= len(step.rows):
        told = _list(f"{factor:.3g}" for factor in factors.values())
        said = f"Named: accumulation: the rows of each micro-batch have their weight times {told}."
        return Explanation("accumulation", said)
    return _of_rows(read, slopes, step, near)


def factors_of(read: Weights, slopes: Weights, keys: Sequence[Any], step: Step, near: float) -> dict[Any, float]:
    """Return what the weights of rows with the same key are multiplied by; nothing where this leaves much over.

    By rows of tokens of their own, where there are some: of the others it is not known which is which.

    Args:
        read: of all rows.
        slopes: those that they should be.
        keys: one for each row.
        step: with the rows.
        near: what may be left over, of the norm of all.
    """
    products, squares, alike = dict.fromkeys(keys, 0.0), dict.fromkeys(keys, 0.0), _alike(step)
    for number, key in sorted(enumerate(keys), key=lambda row: len(alike[row[0]])):
        if len(alike[number]) == 1 or not squares[key]:
            products[key] += float((read[str(number)] * slopes[str(number)]).sum())
            squares[key] += float(slopes[str(number)].square().sum())
    factors = {key: products[key] / squares[key] if squares[key] else 1.0 for key in products}
    left = {str(n): read[str(n)] - factors[key] * slopes[str(n)] for n, key in enumerate(keys)}
    return factors if norm(merged(left, step)) <= near * norm(merged(read, step)) else {}


def _of_rows(read: Weights, slopes: Weights, step: Step, near: float) -> Explanation | None:
    """Return the weights of rows, where each row's tokens have the right ones times a number."""
    usual = float(step.weights[step.weights > 0].mean()) if (step.weights > 0).any() else 1.0
    least = 1e-9 * max(float(own.abs().max()) for own in slopes.values())
    given, expected, left = list[float](), list[float](), Weights()
    for number, own in merged(read, step).items():
        row, right, weight = step.rows[int(number)], slopes[number], float(step.weights[int(number)]) or usual
        trained = torch.tensor([float(p < len(row.completion) and p not in row.given) for p in range(len(right))])
        count = trained.sum().clamp(min=1)
        # of tokens with ratios of their own: the root mean square, with the sign of the mean
        size = math.copysign(float(((right * trained).square().sum() / count).sqrt()), float((right * trained).sum()))
        unit = right / size if abs(size) > least else trained.double()
        factor = float((own * unit).sum() / unit.square().sum().clamp(min=1e-12))
        left[number] = own - factor * unit
        given.append(-factor / weight)
        expected.append(-size / weight if abs(size) > least else 0.0)
    alike = _alike(step)
    means = [sum(expected[other] for other in alike[n]) / len(alike[n]) for n in range(len(given))]
    scale = math.sqrt(sum(each**2 for each in expected) / len(expected))
    off = [n for n in range(len(given)) if abs(given[n] - means[n]) > OFF * scale]
    if norm(left) > near * norm(merged(read, step)) or not off:
        return None
    weights = tuple(Weight(f"row {n + 1}", mean, own) for n, (mean, own) in enumerate(zip(means, given)))
    # Rows that keep their own weight give it to no other: where rewards take few values, any weight is some row's.
    single, sources = [n for n in off if len(alike[n]) == 1], list[int]()
    open_to = [n for n in range(len(given)) if n in single or len(alike[n]) > 1]
    for n in single:
        source = min(open_to, key=lambda place: abs(expected[place] - given[n]))
        if abs(expected[source] - given[n]) <= near * scale:
            open_to.remove(source)
            sources.append(source)
    if len(sources) == len(single) > 1:
        told = _list(str(n + 1) for n in single), _list(str(n + 1) for n in sources)
        name = "other rows' advantages"
        said = f"Named: {name}: rows {told[0]} were given the weights of rows {told[1]}."
        return Explanation(name, said, weights=weights)
    told_rows = [f"{weights[n].name} {given[n]:+.2f} where {means[n]:+.2f} is right" for n in off]
    return Explanation(None, f"Read: rows have other weights: {'; '.join(told_rows[:4])}.", weights=weights)


def _list(words: Any) -> str:
    told = [*words]
    return ", ".join(told[:6]) + (f" and {len(told) - 6} more" if len(told) > 6 else "")


def table(weights: Sequence[Weight]) -> str:
    """Return the weights of rows that are not what they should be, as lines; "" where there are none."""
    off = [str(each) for each in weights if f"{each.expected:+.3f}" != f"{each.given:+.3f}"]
    more = [f"and {len(off) - MOST_TOLD} more"] * (len(off) > MOST_TOLD)
    return "\n".join([f"{'advantage':28}expected  given", *off[:MOST_TOLD], *more]) if off else ""
