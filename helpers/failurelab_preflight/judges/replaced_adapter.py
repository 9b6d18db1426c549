"""F8: a trained adapter that a new one has replaced, which begins at zero.

Upstream: the registry's F8.
"""

from collections.abc import Iterator

from failurelab.measure import differences
from failurelab_preflight.finding import Finding, Quantity
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.repairs import Keyword
from failurelab_preflight.stage import models
from failurelab_preflight.training import Training


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
    measured = differences.of_adapter(trained.logits, trained.base, now) | {"adapter_tensors": 1}
    effect, lost = measured["adapter_effect"], measured["adapter_lost"]
    figures = (Quantity("adapter_effect", effect or 0.0, "logits"), Quantity("adapter_lost", lost or 0.0, "share"))
    without = differences.of_adapter(trained.logits, trained.base, trained.base)
    evidence = f"the adapter {trained.name} is at work when training begins"
    if lost is None:
        evidence = f"the model that is trained is another one than that with the adapter {trained.name}"
    if settled := settle("F8", [measured], {"a new adapter": without}, evidence, figures=figures):
        yield settled
        return
    yield Finding(
        "F8",
        f"the trained adapter {trained.name} is replaced by a new one that begins at zero: when training begins, "
        f"{lost:.0%} of what it does to the logits ({effect:.2g} at most) is gone",
        "no peft_config for a model that has its adapter",
        undo=Keyword("trainer", "peft_config"),
        figures=figures,
    )
