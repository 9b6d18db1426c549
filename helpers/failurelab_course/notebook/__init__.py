"""What a cell of a notebook uses. `notebook.setup()` is the first."""

import json
from typing import Any

from failurelab_course import eras
from failurelab_course.notebook.display import NotRun, not_run, record, setup, show, verdict_table
from failurelab_course.notebook.sliders import knobs

__all__ = ["NotRun", "knobs", "model_path", "not_run", "record", "records", "setup", "show", "verdict_table"]


def records(name: str) -> list[dict[str, Any]]:
    """Return the records of `evidence/cpu/NAME.json`: what a benchmark measured for this page, with several seeds."""
    path = eras.root() / "evidence" / "cpu" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["records"]


def model_path(model: str, *, device: str = "cpu", seed: int = 0, fall_back: bool = False) -> str:
    """Return what `from_pretrained` reads the model from that a notebook shows learning with.

    As `model_choice.model_path`, which is imported here, for it imports torch.
    """
    from failurelab_course.notebook import model_choice

    return model_choice.model_path(model, device=device, seed=seed, fall_back=fall_back)
