"""F13, F14, F16 and F18 in a script's own rollouts and loops: what the ledger of tokens says, by the registry.

trl takes each token that a `rollout_func`, or a `_generate` of one's own, returns for one of the completion, drawn by
the policy behind the prompt that stands there. `failurelab.textbook.ledger` has each of them beside its draw.

Upstream: trl's `GRPOTrainer._generate_and_score_completions`; TRL #4543; MemGen PR #33; miles PR #2075.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from failurelab import failures, textbook
from failurelab.failures import verdicts
from failurelab_preflight.finding import SCRIPT, Finding, Quantity, Verdict
from failurelab_preflight.judges.replaced import codes_of
from failurelab_preflight.judges.settled import alone, settle
from failurelab_preflight.script_text import location, read_source
from failurelab_preflight.training import Training

ONE_ORDER = (
    "Repeat prompts, columns and completions in one order, and group them in it: prompt 1 for all of its completions, "
    "then prompt 2 (repeat_interleave, and torch.stack(completions, 1).flatten(0, 1) behind a loop of generations)."
)
_MAKERS = ("rollout_func", "_generate", "_generate_single_turn")


@dataclasses.dataclass(frozen=True)
class _Reading:
    """A mechanism of the registry that the ledger tells.

    Attributes:
        failure: its id.
        mechanism: its name in the registry.
        fault: of the finding.
        repair: in words, with the name of the function that draws as `{maker}`.
        figures: that are told with it, each with the one that makes it large or small, or "".
        why: what is not known where it is found, so that it is a suspicion; "" where all is.
        of_loops: whether it is told of every loop of one's own, and not of what draws alone.
        by_trainer: the repair where the script draws nothing by itself and changes the trainer: then it is told too.
    """

    failure: str
    mechanism: str
    fault: str
    repair: str
    figures: tuple[tuple[str, str], ...]
    why: str = ""
    of_loops: bool = False
    by_trainer: str = ""


READINGS = (
    _Reading(
        "F18", "another context", "context",
        "Return from {maker} each completion behind the ids that it was drawn behind: of several turns the first "
        "prompt, then the completion, the next turn's prompt (env_mask 0) and its completion, each drawn behind all "
        "that stands before it; or a row of its own for each turn.",
        (("context_gap", ""), ("moved_tokens", "tokens_trained")),
    ),
    _Reading(
        "F13", "padding is trained on", "",
        "Cut what {maker} returns at the end of each completion, and its logprobs likewise.",
        (("padding_trained", "tokens_trained"),),
        by_trainer="Leave the trainer's completion_mask as it is, or multiply it by your own.",
    ),
    _Reading(
        "F13", "the end is lost", "end",
        "Return from {maker} the ids that were drawn, up to the end and with it, and no text encoded again.",
        (("ends_drawn", ""),), "whether it was meant to be left out is not known",
    ),
    _Reading(
        "F16", "another model draws", "",
        "Let the trainer's model draw, or hand its weights over at each step, those of an adapter merged.",
        (("policy_gap", "policy_moved"),), "it may be given the weights after more steps than were run",
    ),
    _Reading(
        "F14", "columns of another row", "pairs", ONE_ORDER, (("columns_moved", "completions_paid"),), of_loops=True
    ),
)  # fmt: skip


def find_maker(training: Training) -> tuple[str, types.CodeType | None]:
    """Return the name of the function of the script's own that draws for the trainer, and its code; "" if none does."""
    for name in _MAKERS:
        value = getattr(training.trainer, name, None)
        if callable(value) and not inspect.isroutine(value) and not isinstance(value, functools.partial):
            value = type(value).__call__  # of an object that can be called, the code is its class's
        for code in codes_of(value):
            if training.own(code.co_filename):
                return name, code
    return "", None


def judge_ledger(
    training: Training, ledger: textbook.Ledger, maker: str, code: types.CodeType | None, where: str = ""
) -> Iterator[Finding]:
    """Tell what the ledger says of a script's own rollouts, and of a loop of its own.

    Args:
        training: of the script.
        ledger: of its steps.
        maker: what `find_maker` gave before anything listened, and its code.
        code: see maker.
        where: what the script overrides, as a sentence.
    """
    figures, controls = ledger.figures, ledger.controls
    for reading in READINGS:
        if not (maker or reading.of_loops or reading.by_trainer):
            continue
        more: dict[str, Any] = {"part": "" if reading.of_loops else maker, "fault": reading.fault}
        said = ", ".join(f"{name} {figures[name]:.3g}" for name, _ in reading.figures if figures[name] is not None)
        evidence = f"of {f'what {maker} returned' if maker else 'what is trained on'}: {said}"
        settled = settle(reading.failure, [figures], controls, evidence, reading.mechanism, **more)
        if settled is None:
            yield _found(training, reading, figures, code, more, where * (not more["part"]))
        elif not reading.of_loops and settled.verdict is not Verdict.NOT_APPLICABLE:
            yield settled


def _found(
    training: Training,
    reading: _Reading,
    figures: dict[str, Any],
    code: types.CodeType | None,
    more: dict[str, Any],
    where: str,
) -> Finding:
    maker, trainer = more["part"], training.trainer
    says = verdicts.judge(alone(reading.failure, reading.mechanism), [figures]).says
    told = [(name, figures[name], figures.get(scale)) for name, scale in reading.figures if figures[name] is not None]
    table = failures.figures.table()
    more["figures"] = tuple(Quantity(table[name].what, value, table[name].unit, scale) for name, value, scale in told)
    repair, why = reading.repair.format(maker=maker) if maker else reading.by_trainer or reading.repair, reading.why
    if reading.fault == "end" and getattr(trainer.args, "mask_truncated_completions", False):
        says += ". With mask_truncated_completions each is taken for cut, and none of its tokens is trained on"
        why = ""
    if reading.failure == "F16" and code is not None:
        more["place"] = location(code.co_filename, code.co_firstlineno, read_source(code.co_filename))
    if why:
        return Finding.suspected(reading.failure, says, why, repair, **more)
    return Finding(reading.failure, f"{says}.{where}" if where else says, repair, origin=SCRIPT * bool(where), **more)
