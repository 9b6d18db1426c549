"""Notebook 05: the reward climbs instead of falling."""

MEASURE = """
metrics = {"first": log[0]["reward"], "last": log[-1]["reward"], "kl": log[-1]["kl"]}
healed = metrics["last"] > metrics["first"] + 0.2
"""
