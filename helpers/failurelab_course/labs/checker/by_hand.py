"""What a lab's script meets on a node with two GPUs, for a learner who runs it by hand on a machine without."""

import pathlib
import tempfile

from failurelab_course.experiments import models, observe
from failurelab_course.labs.checker import measure


def show(script: str, kind: str, function: str) -> None:
    """Run a script on the simulated node of its lab, and print what is raised there, and by whom.

    `kind` is the lab's, `placement` or `node`; `function` is what the script defines.
    """
    observe.quiet()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure.run(pathlib.Path(script), models.path("tiny"), pathlib.Path(folder), function, kind)
    metrics = measured.metrics
    print("On a node with two GPUs (simulated: no number is computed):")
    if reason := measured.refused or measured.environment or metrics["error"]:
        print(f"  the script: {reason}")
    print(f"  accelerate refuses {metrics['ranks_refused']} process(es). {metrics['refusal']}")
    if "layers_refused" in metrics:
        many, one = metrics["layers_refused"], metrics["layers_refused_single"]
        print(f"  {many} 4-bit layers refuse to train, {one} to generate for one prompt. {metrics['layer_refusal']}")
