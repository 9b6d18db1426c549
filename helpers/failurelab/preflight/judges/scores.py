"""F15: completions drawn at one temperature and scored at another.

GRPOTrainer of trl 0.14 and 0.15 hands the temperature to generate() and leaves it out of its log-probabilities: policy
and reference model are scored as if it had been 1. The default there is 0.9. Later releases divide the logits by it, or
let a fused head do so; both read `self.temperature`, which the earlier ones do not have. A temperature in
`generation_kwargs` reaches the generation alone, in every release that has this option.

Upstream: TRL #3029.
"""

import inspect
from collections.abc import Iterator

from failurelab.preflight.answers import Answer, Finding, NotApplicable, NotChecked
from failurelab.preflight.inputs import Seen
from failurelab.preflight.judges.rows import trl_source

_NOTEBOOK = "10_two_policies"
_OFF = 0.02  # from 1; less changes no log-probability that training would notice


def judge_scores(seen: Seen) -> Iterator[Answer]:
    """Tell a temperature other than 1 where this release's log-probabilities know none."""
    classes = type(seen.trainer).__mro__
    if not any(cls.__name__ == "GRPOTrainer" and cls.__module__.startswith("trl.") for cls in classes):
        return
    temperature = seen.asked.get("temperature")
    if temperature is None:
        return
    drawn = _drawn_at(seen)
    if abs(drawn - temperature) > _OFF:
        yield Finding(
            "F15",
            f"completions are drawn at temperature {drawn:g}, by generation_kwargs, and scored at "
            f"{temperature if 'self.temperature' in trl_source(seen.trainer) else 1:g}",
            f"Give the temperature to the config, temperature={drawn:g}, and take it out of generation_kwargs.",
            _NOTEBOOK,
        )
    elif abs(temperature - 1) <= _OFF:
        yield NotApplicable("F15", "completions are drawn at temperature 1, which needs no division")
    elif "self.temperature" in trl_source(seen.trainer):
        yield NotChecked(
            "F15",
            f"drawn at temperature {temperature:g}; the step against the textbook tells whether the scores have it",
        )
    elif any("temperature" in _own_source(cls) for cls in classes if not cls.__module__.startswith("trl.")):
        yield NotChecked(
            "F15", "the script's own trainer names the temperature; how it scores with it was not looked at"
        )
    else:
        yield Finding(
            "F15",
            f"completions are drawn at temperature {temperature:g} and scored at 1: this trl leaves it out "
            "of its log-probabilities",
            "Set temperature=1.0, or upgrade to trl 0.16 or later.",
            _NOTEBOOK,
        )


def _drawn_at(seen: Seen) -> float:
    """Return the temperature of generation: generation_kwargs come last, and take the config's place."""
    given = getattr(getattr(seen.trainer, "args", None), "generation_kwargs", None) or {}
    return float(given.get("temperature", seen.asked["temperature"]))


def _own_source(cls: type) -> str:
    """Return the source of a class that the script wrote; empty for those of a library."""
    if cls.__module__.partition(".")[0] in ("transformers", "builtins", "abc", "typing", "accelerate", "trl"):
        return ""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
