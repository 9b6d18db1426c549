"""Notebook 10: the engine has the weights that are trained, so that the reward climbs.

vLLM is a stand-in, and trl has the lines of 0.28 to 1.9 again, which read the checkpoint after a sleep.
"""

BEFORE = """
from failurelab_course.experiments import vllm_stand_in

vllm_stand_in.install()
trl_1_9 = vllm_stand_in.reload_at_each_call()  # kept: it ends where it is collected
trl_1_9.__enter__()
"""
MEASURE = """
rows = [row for row in trainer.state.log_history if "reward" in row]
metrics = {"first": rows[0]["reward"], "last": rows[-1]["reward"],
           "gap": rows[-1]["sampling/sampling_logp_difference/mean"]}
healed = metrics["last"] > metrics["first"] + 0.08 and metrics["gap"] < 0.02
"""
SHORT_LORA = [("learning_rate=4e-4", "learning_rate=3e-3")]
SHORT_BROKEN = [("max_steps=40", "max_steps=20")]
