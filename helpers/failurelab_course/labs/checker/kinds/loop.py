"""The kind `loop`: a script whose `train(model, tokenizer, steps)` is a training loop written by hand.

The checker loads the model and hands it over, so it can look at it at every optimizer step; whatever the loop prints or
returns is not asked for. The trained weights are scored by the scorer.
"""

import types

from failurelab_course.experiments import models
from failurelab_course.labs.checker.base import CheckRun, Refused
from failurelab_course.labs.checker.kinds.trainer import watched

STEPS = 50


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Run the script's training loop for `STEPS` steps, and fill in `run.metrics`.

    Raises:
        Refused: there is no such function, or the model came back as another, or on another device.
    """
    metrics = run.metrics
    train = run.function(script, "train(model, tokenizer, steps)")
    model, tokenizer = models.load(str(run.model_path), device=run.device)
    run.stage = "train"
    with watched(model, run, lambda: STEPS):
        train(model, tokenizer, run.stop_after or STEPS)
    run.stage = "measure"
    if others := sorted({name for name, _ in model.named_parameters()} - set(run.start)):
        raise Refused(f"the model came back as another: it has {others[0]}")
    metrics["accuracy_after"] = run.accuracy_of(model.state_dict())
    metrics["accuracy_gain"] = metrics["accuracy_after"] - metrics["accuracy_before"]
