"""What a lab's script meets on a node with two GPUs, for a learner who runs it by hand on a machine without."""

import pathlib
import tempfile

from failurelab_course.experiments import models, observe
from failurelab_course.labs.checker import measure


def show(script: str, kind: str, function: str) -> None:
    """Run a script on the simulated node of its lab, and print what is raised there, and by whom.

    Args:
        script: the path.
        kind: of the lab, `placement` or `node`.
        function: that the script defines.
    """
    observe.quiet()
    with tempfile.TemporaryDirectory() as folder:
        made = measure.run(pathlib.Path(script), models.path("tiny"), pathlib.Path(folder), function, kind)
    told = made.metrics
    print("On a node with two GPUs (simulated: no number is computed):")
    if reason := made.refused or made.environment or told["error"]:
        print(f"  the script: {reason}")
    print(f"  accelerate refuses {told['ranks_refused']} process(es). {told['refusal']}")
    if "layers_refused" in told:
        print(f"  4-bit layers that refuse many rows: {told['layers_refused']}; one row: {told['layers_refused_single']}.")
        print(f"  {told['layer_refusal']}")
