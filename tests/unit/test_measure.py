"""What the checker measures of a run, in every era: the same metrics, whatever the trainer's release."""

import pytest

from failurelab_course.experiments import models, observe
from failurelab_course.labs import metrics
from failurelab_course.labs.checker import measure

SCRIPT = """
from failurelab_course.experiments import models, trainers


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
    found = made.metrics
    assert set(found) == set(metrics.of("trainer"))
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
    assert made.metrics["tensors_frozen"] == 1
    assert made.metrics["tensors_without_gradient"] == 2
    assert made.metrics["tensors_changed"] == 25


def test_other_weights_are_refused(measured):
    assert "its weights differ before training" in measured("model.lm_head.weight.data.mul_(2)").refused


# Kinds about logits

BY_ERA = {  # rows made too many; off by
    "trl-0.14": (False, 0),
    "trl-0.15": (True, 0),
    "trl-0.14-tf-4.52": (True, 6),
}


@pytest.mark.skipif(observe.era() not in BY_ERA, reason="trl's fused head returns no logits to read")
def test_rows_of_logits_are_read_in_the_trainer_s_own_pass(tmp_path):
    """Rows made and used, and the token that each is scored against, as each stack really does it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(change="pass"))
    made = measure.run(script, models.path("tiny"), tmp_path / "output", "GRPOTrainer", "logits")
    assert (made.traceback, made.refused) == ("", "")
    wasteful, off = BY_ERA[observe.era()]
    found = made.metrics
    assert (found["rows_made"] > found["rows_needed"]) == wasteful or off
    assert found["positions_off"] == 0 if not off else found["positions_off"] > 1


FUNCTION = """
from failurelab import logits


def log_probs(model, ids, mask, n):
    {body}
"""
RIGHT = "return logits.completion_logps(model, ids, mask, n)"
PICK = "model(input_ids=ids{mask}).logits[:, {rows}].log_softmax(-1).gather(-1, ids[:, -n:, None])[..., 0]"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # one row for each of the three completion tokens
        (RIGHT, {"positions_off": 0, "rows_made": 3, "scores_from": ""}),
        ("return " + PICK.format(mask=", attention_mask=mask", rows="-n - 1 : -1"), {"positions_off": 0}),
        ("return " + PICK.format(mask=", attention_mask=mask", rows="-n:"), {"positions_off": -1}),
        ("return " + PICK.format(mask=", attention_mask=mask", rows="-n - 2 : -2"), {"positions_off": 1}),
        ("return " + PICK.format(mask="", rows="-n - 1 : -1"), {"positions_off": None}),
        ("return -" + RIGHT.removeprefix("return "), {"positions_off": None}),
        (RIGHT + ".detach()", {"positions_off": 0, "gradient_error": None}),
        (RIGHT + " + 0 * ids.sum()", {"positions_off": 0}),
    ],
)
def test_a_scoring_function_is_compared_with_the_truth(tmp_path, body, expected):
    """Right, early, late, blind to the mask, of the other sign, without a graph."""
    script = tmp_path / "train.py"
    script.write_text(FUNCTION.format(body=body))
    made = measure.run(script, models.path("tiny"), tmp_path / "output", "log_probs", "log_probs")
    assert (made.traceback, made.refused) == ("", "")
    found = made.metrics
    assert {name: found[name] for name in expected} == expected
    right = expected["positions_off"] == 0
    assert (found["log_prob_error"] < 1e-4) == right == (found["scores_from"] == "")
    if found["gradient_error"] is not None:
        assert (found["gradient_error"] < 1e-3) == right


def test_what_is_no_score_for_each_token_is_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FUNCTION.format(body=RIGHT + ".mean()"))
    made = measure.run(script, models.path("tiny"), tmp_path / "output", "log_probs", "log_probs")
    assert "not one number for each completion token: (6, 3)" in made.refused
