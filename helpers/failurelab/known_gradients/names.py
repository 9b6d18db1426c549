"""What a gradient that differs is called: the name of the definition whose gradient it is.

In this order, and a later one only where the one before has no name: one option or mistake; a constant factor; one of
these times a factor; two at once. Where several have the same gradient in this case, all are named.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from failurelab.known_gradients import definition
from failurelab.known_gradients.cases import LossCase
from failurelab.known_gradients.definition import REDUCES, WRONG_REDUCES, Batch, LossOptions

TOLERANCE = 5e-4  # of the gradient's norm: float32, and what is added to a deviation where a loss makes advantages
SMALL_APART = 1e-3  # of advantages: what is added to a deviation differs, and is a thousandth at most
EXACT = 1e-6  # a direction this near, times a number, is a constant factor

# The values of each option; an option of another value goes by the name that stands here, else it is `option=value`.
CHOICES: dict[str, dict[Any, str]] = {
    "objective": {"clip": "", "cispo": "", "sapo": "", "dppo": ""},
    "ratio": {"token": "", "sequence": ""},
    "reduce": dict.fromkeys(REDUCES, "") | {"micro_token_mean": "mean of means"},
    "kl": {"k1": "", "k2": "", "k3": ""},
    "kl_gradient": {"pathwise": "KL gradient without its score term", "total": "total KL gradient"},
    "kl_times_ratio": {False: "", True: ""},
    "kl_cap": {None: "", 10.0: "KL capped at 10"},
    "cispo_bound": {"margin": "", "absolute": "bound, not margin"},
    "cispo_low": {True: "", False: "no lower bound"},
    "dual_clip": {None: "no dual clip", 3.0: "dual clip"},
    "empty_rows": {True: "", False: "rows without tokens do not count"},
    "kl_reduce": {
        "same": "", "token_mean": "KL term as a mean over all tokens", "sequence_mean": "KL term as a mean of rows",
    },
    "engine": dict.fromkeys(
        (None, "token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "geometric_mask"), ""
    ),
    "scale": {"group": "", "batch": "", "none": ""},
}  # fmt: skip
WRONG = (
    "wrong sign", "ratio is 1", "padding trained on", "KL with the wrong sign",
    "log-probabilities divided by the temperature",
)  # fmt: skip
WRONG_ADVANTAGES = (
    "a group of one keeps its reward", "mean of the others", "deviation of the others",
    "deviation by n, not n - 1",
)  # fmt: skip
# In a batch that is not cut they are one of the others.
OF_CUTS = {
    "mean of means", "mean of means, of rows", "mean of means, each over all ranks",
    "mean of means, by share of the rows", "mean over each rank's own tokens",
}  # fmt: skip
_SIZES = {"max_length", "engine_low", "engine_high", "wrong"}


def call_option(name: str, value: Any, otherwise: str = "") -> str:
    """Return what an option of another value is called."""
    return CHOICES.get(name, {}).get(value, "") or otherwise or f"{name}={value}"


def others(options: LossOptions, case: LossCase) -> Iterator[tuple[str, LossOptions]]:
    """Yield every option or mistake away from `options` that a case can show, with its name."""
    is_cut = sum(map(len, case.batch.cut)) > 1
    return (each for each in _all_others(options, case.kind) if is_cut or each[0] not in OF_CUTS)


def _all_others(options: LossOptions, kind: str) -> Iterator[tuple[str, LossOptions]]:

    def replace(**change: Any) -> LossOptions:
        return dataclasses.replace(options, **change)

    for field in dataclasses.fields(LossOptions):
        name, value, usual = field.name, getattr(options, field.name), field.default
        if value != usual and name not in _SIZES:
            yield call_option(name, usual, f"option ignored: {name}"), replace(**{name: usual})
        for other in CHOICES.get(name, ()):
            if other not in (value, usual):
                yield call_option(name, other), replace(**{name: other})
    for name in WRONG_REDUCES:
        yield name, replace(reduce=name)
    for name in WRONG_ADVANTAGES if kind == "advantages" else WRONG:
        yield name, replace(wrong=options.wrong | {name})
    if options.reduce == "sequence_sum":  # rows' terms times their lengths, and no mask
        wrong = options.wrong | {"padding trained on"}
        yield "padding trained on", replace(wrong=wrong, reduce="rows' lengths over padded places")


def expected(case: LossCase, options: LossOptions) -> Tensor:
    """Return what a definition gives in a case."""
    return _compute(case.batch, case.kind, options)


@functools.lru_cache(maxsize=20_000)  # many differences are looked for in the same batches
def _compute(batch: Batch, kind: str, options: LossOptions) -> Tensor:
    return definition.advantages(batch, options) if kind == "advantages" else definition.gradient(batch, options)[1]


def tolerance_of(case: LossCase) -> float:
    """Return how far two ways to compute a case may lie apart."""
    return SMALL_APART if case.kind == "advantages" else TOLERANCE


def apart(first: Tensor, second: Tensor) -> float:
    """Return how far one lies from another, as a share of the second's norm."""
    return float((first - second).norm() / second.norm().clamp(min=1e-12))


def compare(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return cosine and ratio of sizes; 0 of nothing."""
    norms = found.norm() * wanted.norm()
    cosine = ((found * wanted).sum() / norms).item() if norms > 0 else 0.0
    return cosine, (found.norm() / wanted.norm().clamp(min=1e-12)).item()


def factor_of(found: Tensor, wanted: Tensor) -> float | None:
    """Return the number that one is of the other; None where it is not."""
    cosine, size = compare(found, wanted)
    return size * (1 if cosine > 0 else -1) if abs(abs(cosine) - 1) < EXACT and size > 0 else None


def say_factor(factor: float, case: LossCase) -> list[str]:
    """Return what a factor is called: by the counts of this case that it is."""
    cut, group = case.batch.cut, case.batch.group
    counts = {"ranks": len(cut), "micro-batches": len(cut[0]), "rows": len(group)}
    counts |= {"rows of a group": int((group == group[0]).sum())}
    known = {f"times the number of {name}": float(count) for name, count in counts.items() if count > 1}
    known |= {f"divided by the number of {name}": 1 / count for name, count in counts.items() if count > 1}
    fits = [name for name, value in known.items() if abs(factor / value - 1) < TOLERANCE]
    return [f"constant factor: {name}" for name in fits] or [f"constant factor {factor:.4g}"]


def call(change: dict[str, Any]) -> list[str]:
    """Return what a change of options is called."""
    names = [call_option(name, value) for name, value in change.items() if name != "wrong"]
    return names + sorted(change.get("wrong", ()))


def find_names(found: Tensor, case: LossCase, declared: LossOptions) -> list[str]:
    """Return what the difference may be; empty where no definition has this gradient."""
    wanted, tolerance = expected(case, declared), tolerance_of(case)
    if found.norm() == 0:
        return ["no gradient"]
    single = [(name, options, expected(case, options)) for name, options in others(declared, case)]
    single = [each for each in single if apart(each[2], wanted) > tolerance and each[2].norm() > 0]
    if fits := [name for name, _, values in single if apart(found, values) < tolerance]:
        return list(dict.fromkeys(fits))
    factor = factor_of(found, wanted)
    if factor is not None and wanted.norm() > 0:
        return ["wrong sign"] if abs(factor + 1) < TOLERANCE else say_factor(factor, case)
    for name, _, values in single:
        if (factor := factor_of(found, values)) is not None:
            fits += [f"{name}, and {each}" for each in say_factor(factor, case)]
    return fits or list(dict.fromkeys(_pairs(found, case, single)))


def _pairs(found: Tensor, case: LossCase, single: list[tuple[str, LossOptions, Tensor]]) -> Iterator[str]:
    for one, first, _ in single:
        for two, both in others(first, case):
            if apart(found, expected(case, both)) < TOLERANCE:
                yield " + ".join(sorted((one, two)))


def settle(fits: dict[str, list[str]]) -> dict[str, str]:
    """Return one name a case, of those that fit: that which explains the most cases; `A or B` where it stays open."""
    settled: dict[str, str] = {}
    open_cases = {case: names for case, names in fits.items() if names}
    while open_cases:
        counts = collections.Counter(itertools.chain.from_iterable(open_cases.values()))
        best = [name for name, count in counts.items() if count == max(counts.values())]
        cases = [case for case, names in open_cases.items() if best[0] in names]
        same = [name for name in best if all(name in open_cases[case] for case in cases)]
        for case in cases:
            settled[case] = " or ".join(same)
            del open_cases[case]
    return settled | {case: "no definition has this gradient" for case, names in fits.items() if not names}


def is_bad(found: object, wanted: Tensor) -> str:
    """Say what is wrong with what an adapter returned, if anything."""
    if not isinstance(found, torch.Tensor):
        return f"returned a {type(found).__name__}, not a tensor"
    if found.shape != wanted.shape:
        return f"returned the shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    if not found.isfinite().all():
        count = int((~found.isfinite()).sum())
        return f"returned {count} of {found.numel()} numbers that are NaN or infinite, or a loss without a gradient"
    return ""
