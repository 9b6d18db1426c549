"""Which model a notebook shows learning with: the one that is asked for, if it can learn the course's task.

A reward curve says something of a failure only where a healthy run would climb. So a model is asked before it is
trained, and a notebook does not pass by curves of a model that could not have learned.
"""

import pathlib

from failurelab_course.experiments import models
from failurelab_course.notebook import display as notebook

_LEARNS = (0.05, 0.9)  # sampled accuracy on the sums; below, most groups of eight completions have no reward at all


def model_path(model: str, *, device: str = "cpu", seed: int = 0, fall_back: bool = False) -> str:
    """Return what `from_pretrained` reads the model from that a notebook shows learning with: a folder, or a hub name.

    Where it is another one than asked for, that is said. GRPO raises the probability of what was rewarded: a model that
    is never right has nothing to learn from, one that is always right nothing to gain. `random-0.5b` knows nothing, so
    `tiny` takes its place. A folder's or the hub's model is asked the sums first, as the notebooks ask them: `3+4=`.

    Args:
        model: as given to the notebook.
        device: where it is asked.
        seed: of its sampled answers.
        fall_back: let `tiny` take the place of a model that cannot be used, too; for a notebook that shows more.

    Raises:
        ModelError: the model cannot be loaded.
        NotRun: it cannot learn this task, and `fall_back` is False.
    """
    if model == "random-0.5b":
        print(f"{model} has random weights: learning is shown with the small model, tiny")
    if model in models.NAMES:
        return models.source("tiny")
    loaded = models.load(model, device=device)
    accuracy = models.accuracy(*loaded, sampled=True, seed=seed, prompts=models.sums())
    if _LEARNS[0] <= accuracy <= _LEARNS[1]:
        return models.source(model)
    lacks = "to reinforce" if accuracy < _LEARNS[0] else "to gain"
    right = f"{accuracy:.0%} of the sums right when it samples"
    reason = f"{pathlib.Path(model).name} answers {right}, and GRPO needs something {lacks}"
    if not fall_back:
        notebook.not_run(
            f"{reason}: learning cannot be shown with it. Next: --model tiny, or a model that gets 5% to 90% right"
        )
    print(f"{reason}: learning is shown with the small model, tiny")
    return models.source("tiny")
