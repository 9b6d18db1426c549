"""Notebook 07: rank 1 of a simulated node asks accelerate who it is before it makes its map, and is accepted."""

# No machine of the tests has two GPUs.
BEFORE = """
import contextlib
from failurelab_course.experiments import rank

node = contextlib.ExitStack()
node.enter_context(rank.of_a_node(1))
"""
RAISES = r"ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device"
MEASURE = """
metrics = {"map": str(device_map[""]), "accepted": trainer.accepted}
healed = metrics == {"map": "cuda:1", "accepted": True}
"""
