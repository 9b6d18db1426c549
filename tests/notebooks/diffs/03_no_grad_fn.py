"""Notebook 03: the script ends in its error; with the diff every adapter trains, and on sane rollouts."""

RAISES = "element 0 of tensors does not require grad"
MEASURE = """
started = {name: bool(p.any()) for name, p in trainer.model.named_parameters() if "lora_B" in name}
rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
metrics = {"adapters": len(started), "trained": sum(started.values()), "reward": sum(rewards) / len(rewards)}
# B begins at zero; garbage completions earn about 0.18 here, sane ones 0.40
healed = metrics["trained"] == metrics["adapters"] and metrics["reward"] > 0.3
"""
