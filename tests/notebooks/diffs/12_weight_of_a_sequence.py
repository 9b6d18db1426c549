"""Notebook 12: the mean importance weight is near 1 at 128 tokens, as it is on average by definition."""

BEFORE = """
from failurelab_course.experiments import vllm_stand_in

vllm_stand_in.install(eight_bits=True)
"""
MEASURE = """
rows = [row for row in trainer.state.log_history if "reward" in row]
weights = [row["sampling/importance_sampling_ratio/mean"] for row in rows]
gaps = [row["sampling/sampling_logp_difference/mean"] for row in rows]
metrics = {"weight": sum(weights) / len(weights), "gap": max(gaps)}
healed = abs(metrics["weight"] - 1) < 0.1 and metrics["gap"] < 0.15
"""
SHORT = [("max_steps=5", "max_steps=3")]
