"""Notebook 07: with the diff each rank's map names its own device, also where each process sees one GPU alone.

The script has its own adapters. No machine of the tests has two GPUs.
"""

BEFORE = """
import contextlib
from failurelab_course.experiments import rank

node = contextlib.ExitStack()
node.enter_context(rank.of_a_node(1))
"""
RAISES = r"ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device"
LORA = None
MEASURE = """
def place(trained):
    return trained.accepted and str(trained.model.get_base_model().hf_device_map[""])

metrics = {"rank 1 of two": place(trainer)}
node.close()
for number, gpus in ((0, 2), (1, 1)):
    with rank.of_a_node(number, gpus=gpus):
        metrics[f"rank {number}, {gpus} visible"] = place(train())
healed = list(metrics.values()) == ["cuda:1", "cuda:0", "cuda:0"]
"""
