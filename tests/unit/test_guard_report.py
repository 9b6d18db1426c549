"""What the guards of a run leave in its output folder, for `failurelab diagnose`."""

import json

import datasets
import pytest
import torch
import transformers
from small import qwen2

from failurelab import guards


def train(folder, *callbacks):
    rows = datasets.Dataset.from_dict({name: [[1, 2, 3]] * 4 for name in ("input_ids", "labels")})
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, learning_rate=1e-3, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model=qwen2(), args=args, train_dataset=rows, callbacks=[*callbacks])
    trainer.train()
    return json.loads((folder / "failurelab.json").read_text())["notices"]


class Finds(guards.base.Guard):
    failures = ("F1", "F2")

    def on_train_begin(self, args, state, control, **_):
        """Begin; a guard's report lies where this run's output goes."""

    def on_step_end(self, args, state, control, **_):
        """Find it."""
        self._trip(f"step {state.global_step}", None, ("F2",) if state.global_step == 2 else ())


def test_each_guard_leaves_what_it_measured(tmp_path):
    with pytest.warns(guards.GuardWarning):
        notices = train(tmp_path, guards.GradientGuard("stop"), Finds("warn"))
    kinds = [(notice["guard"], notice["kind"], notice["failures"]) for notice in notices]
    assert ("GradientGuard", "held", ["F1", "F23"]) in kinds  # without an adapter there is no F2
    assert ("Finds", "found", ["F1", "F2"]) in kinds and ("Finds", "found", ["F2"]) in kinds
    assert [notice["guard"] for notice in train(tmp_path, guards.GradientGuard("stop"))] == ["GradientGuard"]


def test_a_guard_that_had_nothing_to_check_says_so(tmp_path):
    """Its failure did not hold: a plain trainer draws no rollouts, and two steps are too few for UpdateGuard."""
    notices = train(tmp_path, guards.GradientGuard("stop"), guards.RolloutGuard(), guards.UpdateGuard())
    kinds = {notice["guard"]: notice["kind"] for notice in notices}
    assert kinds == {"GradientGuard": "held", "RolloutGuard": "n/a", "UpdateGuard": "n/a"}


def test_a_run_that_is_stopped_has_left_why(tmp_path):
    with pytest.raises(guards.GuardTripped):
        train(tmp_path, Finds("stop"))
    assert json.loads((tmp_path / "failurelab.json").read_text())["notices"][0]["message"] == "step 1"


def test_a_report_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "failurelab.part").mkdir()
    torch.manual_seed(0)
    with pytest.warns(guards.GuardWarning, match="cannot be written"), pytest.raises(FileNotFoundError):
        train(tmp_path, guards.GradientGuard("stop"))
