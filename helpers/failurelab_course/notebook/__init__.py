"""What a cell of a notebook uses. `notebook.setup()` is the first."""

import json
import pathlib
from typing import Any

from failurelab_course import eras
from failurelab_course.notebook.display import NotRun, not_run, record, setup, show, verdict_table
from failurelab_course.notebook.sliders import knobs

_LEARNS = (0.05, 0.9)  # sampled accuracy on the sums; below, most groups of eight completions have no reward at all

__all__ = ["NotRun", "knobs", "model_path", "not_run", "record", "records", "setup", "show", "verdict_table"]


def records(name: str) -> list[dict[str, Any]]:
    """Return the records of `evidence/cpu/NAME.json`: what a benchmark measured for this page, with several seeds."""
    path = eras.root() / "evidence" / "cpu" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["records"]


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
    from failurelab_course.experiments import models  # which imports torch

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
        not_run(f"{reason}: learning cannot be shown with it. Next: --model tiny, or a model that gets 5% to 90% right")
    print(f"{reason}: learning is shown with the small model, tiny")
    return models.source("tiny")
