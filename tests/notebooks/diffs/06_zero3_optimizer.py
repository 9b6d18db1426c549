"""Notebook 06: the callback gets the engine, and the run goes on, with no hook on while it generates."""

# What a launcher does.
BEFORE = """
import contextlib
from failurelab_course.experiments import deepspeed as launcher

launched = contextlib.ExitStack()
launched.enter_context(launcher.one_process())
"""
RAISES = r"AttributeError: 'Qwen2ForCausalLM' object has no attribute 'optimizer'"
MEASURE = """
from failurelab import zero3

with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as policy:
    metrics = {"steps": trainer.state.global_step, "inside": zero3.hooks(policy)}
metrics["after"] = zero3.hooks(trainer.model)
healed = metrics["steps"] == 2 and metrics["inside"] == 0 < metrics["after"]
"""
