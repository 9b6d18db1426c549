"""Notebook 03: the script ends in its error; with the diff every adapter trains, and on right rollouts.

Its script has an adapter of its own.
"""

RAISES = "element 0 of tensors does not require grad"
LORA = None
MEASURE = """
now = dict(trainer.model.named_parameters())
changed = sum(not now[name].equal(old) for name, old in started.items())
rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
metrics = {"changed": changed, "trainable": len(started), "reward": sum(rewards) / len(rewards)}
# garbage completions earn about 0.18 here, right ones 0.40
healed = changed == len(started) and metrics["reward"] > 0.3
"""
UPGRADE = {"trl-0.22": [], "today": []}
