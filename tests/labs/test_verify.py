"""The three-state proof of every lab, run for real: broken fails as declared, wrong fixes too, the solution heals."""

import re

import pytest

from failurelab_course.labs import verify as labs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def matrix():
    """All labs in all states: the long part, run once."""
    return labs.verify()


def test_every_row_holds(matrix):
    """Whatever is not a PASS is shown with its reason."""
    assert [f"{row.lab} {row.script}: {row.result}: {row.reason}" for row in matrix if row.result != "PASS"] == []
    assert labs.exit_status(matrix) == 0
    assert re.fullmatch(r"\d+ labs: (\d+) of \1 PASS", labs.summary(matrix))
    assert len({(row.lab, row.state) for row in matrix}) == 3 * len(labs.known())


def test_healed_means_that_what_was_lost_is_back(matrix):
    """Gradients for all, rollouts as good as the model, and a model that has learned; not that a warning is gone.

    Whatever the lab's own file demands. And before, nothing was raised: only measuring shows what is wrong.
    """
    about = {lab.name for lab in labs.find() if {"F1", "F7"}.issuperset(lab.failures) and not lab.false_alarm}
    assert len(about) >= 5
    for row in (row for row in matrix if row.lab in about and row.state != labs.WRONG_FIX):
        metrics = row.metrics
        assert metrics["error"] == "" and metrics["steps_done"] > 0 and metrics["finite"]
        if row.state == labs.RIGHT_FIX:
            assert metrics["tensors_without_gradient"] == 0
            assert metrics["tensors_changed"] == metrics["tensors_trainable"] > 1
            assert metrics["rollout_gap"] < 0.1
            assert metrics["reward_last"] > metrics["accuracy_before"]
            assert metrics["accuracy_gain"] > 0  # by how much, the lab's own file says


def test_a_false_alarm_is_healthy_all_the_time(matrix):
    """The run is the same in every state but the wrong fixes; what heals is a verdict with figures that hold."""
    names = [lab.name for lab in labs.find() if lab.false_alarm]
    assert len(names) >= 2
    for name in names:
        broken, solved = (
            next(r for r in matrix if (r.lab, r.state) == (name, state)) for state in (labs.BROKEN, labs.RIGHT_FIX)
        )
        for figure in ("accuracy_after", "tensors_changed", "warnings", "reward_last"):
            assert broken.metrics[figure] == pytest.approx(solved.metrics[figure], abs=1e-6)
        assert (broken.metrics["answer"], solved.metrics["answer"]) == ("", "harmless")
        assert solved.metrics["answer_claims"] >= 3 and solved.metrics["answer_wrong"] == 0
