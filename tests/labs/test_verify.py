"""The three-state proof of every lab, run for real: broken fails as declared, wrong fixes too, the solution heals."""

import json
import os
import re

import pytest

from failurelab import failures as registry
from failurelab_course.labs import verify as labs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def matrix():
    """All labs in all states: the long part, run once."""
    return labs.verify()


def rows(matrix, state):
    found = [row for row in matrix if row.state == state]
    assert found
    return found


def test_every_row_holds(matrix):
    """Whatever is not a PASS is shown with its reason."""
    assert [f"{row.lab} {row.script}: {row.result}: {row.reason}" for row in matrix if row.result != "PASS"] == []
    assert labs.exit_status(matrix) == 0
    assert re.fullmatch(r"\d+ labs: (\d+) of \1 PASS", labs.summary(matrix))


def test_each_lab_has_its_three_states(matrix):
    for name in labs.known():
        states = [row.state for row in matrix if row.lab == name]
        assert states.count("broken") == states.count("right_fix") == 1
        assert states.count("wrong_fix") >= 1


def training_of(matrix, state, *ids):
    """Return the rows of labs that are about these failures alone, and train."""
    about = {lab.name for lab in labs.find() if lab.failures and set(lab.failures) <= set(ids) and not lab.false_alarm}
    return [row for row in rows(matrix, state) if row.lab in about]


def test_silent_failures_are_silent(matrix):
    """No broken run raises anything: steps are done, a loss is there, and only measuring shows what is wrong."""
    found = training_of(matrix, "broken", "F1", "F7")
    assert len(found) >= 5
    for row in found:
        assert row.metrics["error"] == ""
        assert row.metrics["steps_done"] > 0
        assert row.metrics["finite"]


def test_healed_means_that_what_was_lost_is_back(matrix):
    """Gradients for all, rollouts as good as the model, and a model that has learned; not that a warning is gone."""
    for row in training_of(matrix, "right_fix", "F1", "F7"):
        metrics = row.metrics
        assert metrics["tensors_without_gradient"] == 0
        assert metrics["tensors_changed"] == metrics["tensors_trainable"] > 1
        assert metrics["rollout_gap"] < 0.1
        assert metrics["reward_last"] > metrics["accuracy_before"]
        assert metrics["accuracy_gain"] >= 0.1


def test_a_false_alarm_is_healthy_all_the_time(matrix):
    """The run is the same in every state but the wrong fixes; what heals is a verdict with figures that hold."""
    names = [lab.name for lab in labs.find() if lab.false_alarm]
    assert len(names) >= 2
    for name in names:
        broken, solved = (next(r for r in rows(matrix, s) if r.lab == name) for s in ("broken", "right_fix"))
        for figure in ("accuracy_after", "tensors_changed", "warnings", "reward_last"):
            assert broken.metrics[figure] == solved.metrics[figure]
        assert (broken.metrics["answer"], solved.metrics["answer"]) == ("", "harmless")
        assert solved.metrics["answer_claims"] >= 3 and solved.metrics["answer_wrong"] == 0


def test_every_failure_has_its_labs(matrix):
    """One for each failure in the registry but those named here; the first seven have two, in different clothes."""
    about = [id for lab in labs.find() for id in lab.failures]
    without = {
        "F22",  # preflight tells it before anything is trained
        "F23",  # the same
    }
    assert {failure.id for failure in registry.all()} - set(about) == without
    twice = ("F1", "F2", "F3a", "F3b", "F4", "F5", "F6", "F7")
    assert [id for id in twice if about.count(id) < 2] == []
    assert 24 <= len(labs.known()) <= 38


def test_the_warning_tells_nothing(matrix):
    """It is there after the repair, and gone after a filter that repaired nothing."""
    solution = next(row for row in rows(matrix, "right_fix") if row.lab.startswith("01"))
    assert solution.metrics["warnings"] > 0
    hidden = next(row for row in rows(matrix, "wrong_fix") if row.lab.startswith("01") and "filter" in row.script)
    assert hidden.metrics["warnings"] == 0
    assert "the warning is gone, but 24 of 25 tensors still have no gradient" in hidden.reason


def test_the_popular_wrong_fixes_are_here(matrix):
    """The three that the threads recommend: a filter, enable_input_require_grads alone, the model's own use_cache."""
    reasons = {row.script: row.reason for row in rows(matrix, "wrong_fix")}
    assert "no gradient" in reasons["filter_warnings"]
    assert "every tensor has a gradient, but the rollouts are garbage" in reasons["enable_input_require_grads"]
    assert "the rollouts are garbage" in reasons["model_config_use_cache"]


def test_two_failures_hide_each_other(matrix):
    """Lab 03: after either repair alone one figure is right, the other is not, and nothing is learned."""
    by_script = {row.script: row.metrics for row in matrix if row.lab.startswith("03")}
    gradients, rollouts = by_script["gradients_only"], by_script["rollouts_only"]
    assert gradients["tensors_without_gradient"] == 0 and gradients["rollout_gap"] > 0.1
    assert rollouts["tensors_without_gradient"] == 12 and rollouts["rollout_gap"] < 0.1
    solution = by_script["solution"]
    assert gradients["reward_last"] < gradients["accuracy_before"] < solution["reward_last"]
    assert rollouts["accuracy_gain"] < 0.1 <= solution["accuracy_gain"]


def test_four_failures_are_measured_beside_each_other(matrix):
    """Lab 19: an error in the first step hides none of the others, and one device does not hide the second."""
    by_script = {row.script: row.metrics for row in matrix if row.lab.startswith("19")}
    broken, three = by_script["start"], by_script["three_of_four"]
    assert "element 0 of tensors" in broken["error"] and broken["steps_done"] == 0
    assert broken["rollout_gap"] > 0.1 and broken["rows_made"] > broken["rows_needed"] > 0
    assert broken["ranks_refused"] == three["ranks_refused"] == 1
    assert three["accuracy_gain"] == by_script["solution"]["accuracy_gain"] >= 0.08


def test_the_matrix_as_table_and_as_json(matrix):
    from rich.console import Console

    console = Console(width=200, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(labs.render(matrix))
    text = console.export_text()
    for word in ("wrong fix", "right fix", "PASS", labs.summary(matrix)):
        assert word in text
    content = json.loads(json.dumps(labs.to_json(matrix), allow_nan=False))
    assert content["exit_status"] == 0
    assert len(content["rows"]) == len(matrix)
    assert content["rows"][0]["figures"]["steps_done"] > 0
