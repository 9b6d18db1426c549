"""Notebook 06: with the diff no hook of ZeRO-3 is on while the model generates, and they are back afterwards.

In two processes; the releases from 0.16 on need no diff. With adapters a newer torch refuses this era's trl, for its
learning-rate schedulers zip strictly ("zip() argument 2 is longer than argument 1"); here they do not.
"""

PROCESSES, ARGUMENTS = 2, ["models/tiny-qwen2", "0"]
# A CPU: see `deepspeed.each_gather_finished`.
BEFORE = """
import builtins, contextlib, sys
from failurelab_course.experiments import deepspeed as launcher, models
from torch.optim import lr_scheduler
from transformers import GenerationMixin

sys.argv[1] = models.source("tiny")
lr_scheduler.zip = lambda *args, strict=False: builtins.zip(*args)
kept = contextlib.ExitStack()
kept.enter_context(launcher.each_gather_finished())
seen, generate = [], GenerationMixin.generate

def watched(self, *args, **options):
    from failurelab import zero3

    seen.append(zero3.hooks(self))
    return generate(self, *args, **options)

GenerationMixin.generate = watched
"""
MEASURE = """
from failurelab import zero3

metrics = {"steps": trainer.state.global_step, "inside": seen, "after": zero3.hooks(trainer.model)}
healed = metrics["steps"] == 3 and len(seen) >= 3 and not any(seen) and metrics["after"] > 0
"""
UPGRADE = {"today": []}
