"""F15: completions drawn at one temperature and scored at another.

GRPOTrainer of trl 0.14 and 0.15 hands the temperature to generate() and leaves it out of its log-probabilities: policy
and reference model are scored as if it had been 1. The default there is 0.9. A temperature in `generation_kwargs`
reaches the generation alone, in every release that has this option.

Both temperatures are read from the cut training: the one from what generate() is handed, the other from the gradient of
the logits z. Of a score log softmax(z / T) that is proportional to softmax(z / T) at every token but the scored one, so
its logarithm rises with z by 1 / T.

Upstream: TRL #3029.
"""

import re
from collections.abc import Iterator
from typing import Any

from failurelab import textbook
from failurelab.preflight.answer import Finding
from failurelab.preflight.inputs import Seen
from failurelab.preflight.repairs import Arguments
from failurelab.preflight.temperature import PLANTED as _PLANTED

_OFF = 0.02  # of the temperatures; less changes no log-probability that training would notice
_ENTROPY = ("entropy_coef", "use_adaptive_entropy")  # options of a loss with an entropy bonus


def judge_scores(seen: Seen) -> Iterator[Finding]:
    """Compare the temperature that completions are drawn at with that of their scores."""
    given = getattr(getattr(seen.trainer, "args", None), "generation_kwargs", None) or {}
    asked = seen.asked.get("temperature")
    if asked is None or not hasattr(seen.trainer, "reward_funcs"):
        return
    if not _has_policy_gradient(seen.trainer):
        name = type(seen.trainer).__name__
        yield Finding.not_applicable(
            "F15", f"the loss of {name} is no policy gradient, which the sampling's temperature is for"
        )
        return
    drawn, scored = seen.drawn_at or float(given.get("temperature", asked)), seen.scored_at
    by_kwargs = abs(drawn - asked) > _OFF
    repair = "Set temperature=1.0, or upgrade to trl 0.16 or later."
    if by_kwargs:
        repair = f"Give the config temperature={drawn:g} and take it out of generation_kwargs."
    if scored is not None:
        evidence = f"completions are drawn at temperature {drawn:g} and scored at {scored:.2f}"
        bonus = next((name for name in _ENTROPY if seen.asked.get(name)), "")
        if abs(drawn / scored - 1) > _OFF and bonus:
            yield Finding.not_checked(
                "F15", f"{evidence}; {bonus}={seen.asked[bonus]} changes the gradient that is read"
            )
        elif abs(drawn / scored - 1) > _OFF:
            undo = Arguments({"temperature": drawn if by_kwargs else 1.0})
            yield Finding("F15", evidence, repair, undo=undo)
        elif seen.scored_planted and abs(seen.scored_planted - _PLANTED) <= _OFF:
            yield Finding.held("F15", evidence, f"scores at {_PLANTED:g} are read as {seen.scored_planted:.2f}")
        else:
            yield Finding.not_checked("F15", f"{evidence}; scores at {_PLANTED:g} could not be told from these")
    elif by_kwargs:
        yield Finding.suspected(
            "F15",
            f"completions are drawn at temperature {drawn:g}, by generation_kwargs, which reach no score",
            "the temperature of the scores could not be read from a gradient of the logits",
            repair,
        )
    elif abs(drawn - 1) <= _OFF:
        yield Finding.not_applicable("F15", "completions are drawn at temperature 1, which needs no division")
    else:
        why = "the step against the textbook tells whether the scores have it"
        if textbook.not_grpo(seen.trainer):
            why = "that of the scores could not be read from a gradient of the logits"
        yield Finding.not_checked("F15", f"drawn at temperature {drawn:g}; {why}")


def _has_policy_gradient(trainer: Any) -> bool:
    """Whether a trainer is GRPO's or RLOO's, or derived from one: `AsyncGRPOTrainer` has another parent."""
    return any(re.search("GRPO|RLOO", kind.__name__) for kind in type(trainer).__mro__)
