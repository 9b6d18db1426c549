"""What the checker measures of a run, in every era: the same figures, whatever the trainer's release."""

import pytest

from failurelab import figures, measure, models

SCRIPT = """
from failurelab import models, trainers


def build_trainer(model_path, output_dir):
    model, tokenizer = models.load(model_path)
    {change}
    return trainers.grpo(model, tokenizer, steps=2, output_dir=output_dir)
"""


@pytest.fixture
def measured(tmp_path):
    """Measure a script that changes the model first."""

    def run(change):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(change=change))
        return measure.run(script, models.path("tiny"), tmp_path / "output", "GRPOTrainer")

    return run


def test_a_healthy_run_is_measured_whole(measured):
    """Two steps: every figure is there, the rollouts are scored, the weights moved."""
    made = measured("pass")
    assert (made.traceback, made.refused, made.environment) == ("", "", "")
    found = made.figures
    assert set(found) == set(figures.of("trainer"))
    assert None not in found.values()
    assert found["steps_done"] == 2
    assert found["tensors_changed"] == found["tensors_trainable"] == found["tensors_total"] == 26
    assert found["tensors_without_gradient"] == found["frozen_changed"] == found["warnings"] == 0
    assert found["rollouts"] > 0 and 0 < found["reward_first"] < 1
    assert abs(found["rollout_gap"]) < 0.25
    assert not found["checkpointing"] and found["finite"]


def test_what_is_frozen_is_told_from_what_lacks_a_gradient(measured):
    """An unused trainable tensor has no gradient; a frozen one is no failure."""
    made = measured(
        "model.get_input_embeddings().requires_grad_(False); model.odd = __import__('torch').nn.Linear(2, 2)"
    )
    assert (made.traceback, made.refused, made.environment) == ("", "", "")
    assert made.figures["tensors_frozen"] == 1
    assert made.figures["tensors_without_gradient"] == 2
    assert made.figures["tensors_changed"] == 25


def test_other_weights_are_refused(measured):
    assert "its weights differ before training" in measured("model.lm_head.weight.data.mul_(2)").refused
