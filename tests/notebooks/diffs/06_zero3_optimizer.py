"""Notebook 06: with the diff no hook is on while GRPOTrainer's own way to a model that generates is open.

In two processes; the releases from 0.16 on need no diff. Not with adapters: there this stack does not train at all,
"ValueError: zip() argument 2 is longer than argument 1", before anything of this failure matters.
"""

LORA = None
PROCESSES, ARGUMENTS = 2, ["models/tiny-qwen2", "0"]
# A CPU: see `deepspeed.each_gather_finished`.
BEFORE = """
import contextlib, sys
from failurelab_course.experiments import deepspeed as launcher, models

sys.argv[1] = models.source("tiny")
kept = contextlib.ExitStack()
kept.enter_context(launcher.each_gather_finished())
from trl.trainer import grpo_trainer

seen, unwrapped = [], grpo_trainer.unwrap_model_for_generation

@contextlib.contextmanager
def watched(model, *rest, **options):
    from failurelab import zero3

    with unwrapped(model, *rest, **options) as policy:
        yield policy
        seen.append(zero3.hooks(policy))

grpo_trainer.unwrap_model_for_generation = watched
"""
MEASURE = """
from failurelab import zero3

metrics = {"steps": trainer.state.global_step, "inside": seen, "after": zero3.hooks(trainer.model)}
healed = metrics["steps"] == 3 and len(seen) >= 3 and not any(seen) and metrics["after"] > 0
"""
UPGRADE = {"today": []}
