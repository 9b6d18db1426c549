"""F8: a trained adapter that a new one has replaced, which begins at zero.

Upstream: the registry's F8.
"""

from collections.abc import Iterator

from failurelab.preflight.answer import Finding, Quantity
from failurelab.preflight.repairs import Keyword
from failurelab.preflight.stage import models
from failurelab.preflight.training import Training

_WORKS = 1e-3  # of a logit: a new adapter changes it by less, and where its norms are computed (DoRA), not by 0


def judge_replaced_adapter(training: Training) -> Iterator[Finding]:
    """Compare what the trainer's model says, before training, with what it said with its trained adapter."""
    if not training.adapters:
        yield Finding.not_applicable("F8", "no trained adapter is loaded")
        return
    trained = training.adapters[-1]
    try:
        now = models.probe(training.trainer.model)
    except Exception as error:
        yield Finding.not_checked("F8", f"the model could not be asked: {type(error).__name__}: {error}")
        return
    effect = (trained.logits - trained.base).abs().max().item()
    kept = (now - trained.logits).abs().max().item()
    lost = (now - trained.base).abs().max().item()
    figures = (Quantity("distance from the adapter's logits", kept, "", effect),)
    if effect < _WORKS:
        why = f"the adapter {trained.name} changes a logit by {effect:.1g} at most, as a new one"
        yield Finding.not_checked("F8", why)
    elif min(kept, lost) > 0.1 * effect:
        why = f"the model that is trained is another one than that with the adapter {trained.name}"
        yield Finding.not_checked("F8", why)
    elif kept <= lost:
        evidence = f"the adapter {trained.name} is at work when training begins"
        yield Finding.held("F8", evidence, f"without it a logit would be {effect:.2g} away", figures=figures)
    else:
        yield Finding(
            "F8",
            f"the trained adapter {trained.name} is replaced by a new one that begins at zero: when training begins, "
            f"logits are the base model's within {lost:.1e}, and {kept:.2f} away from the adapter's",
            "no peft_config for a model that has its adapter",
            undo=Keyword("trainer", "peft_config"),
            figures=figures,
        )
