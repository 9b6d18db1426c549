"""A script's scoring function, measured: what it scores by which row, its gradients, and what cannot be scored."""

import pytest

from failurelab_course.experiments import models
from failurelab_course.labs.checker import measure

FUNCTION = """
from failurelab import logits


def log_probs(model, ids, mask, n):
    {body}
"""
RIGHT = "return logits.completion_logps(model, ids, mask, n)"


@pytest.fixture
def measured(tmp_path):

    def run(body):
        script = tmp_path / "train.py"
        script.write_text(FUNCTION.format(body=body))
        return measure.run(script, models.path("tiny"), tmp_path / "output", "log_probs", "log_probs")

    return run


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # one row for each of the three completion tokens
        (RIGHT, {"positions_off": 0, "rows_made": 3, "scores_from": ""}),
        ("return -" + RIGHT.removeprefix("return "), {"positions_off": None}),
        (RIGHT + ".detach()", {"positions_off": 0, "gradient_error": None}),
    ],
)
def test_a_scoring_function_is_compared_with_the_truth(measured, body, expected):
    """Right, of the other sign, without a graph; by the wrong row and without the mask: labs 08 and 16."""
    made = measured(body)
    assert (made.traceback, made.refused) == ("", "")
    found = made.metrics
    assert {name: found[name] for name in expected} == expected
    right = expected["positions_off"] == 0
    assert (found["log_prob_error"] < 1e-4) == right == (found["scores_from"] == "")
    if found["gradient_error"] is not None:
        assert (found["gradient_error"] < 1e-3) == right


def test_what_is_no_score_for_each_token_is_refused(measured):
    assert "not one number for each completion token: (6, 3)" in measured(RIGHT + ".mean()").refused
