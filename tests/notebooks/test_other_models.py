"""`failurelab run --model FOLDER`: a model in the hub's format that is not the course's, on the CPU."""

import made_models
import pytest

from failurelab_course.notebook_runs import notebooks as course

pytestmark = pytest.mark.slow

LEARNING = ["00_start_here", "02_garbage_rollouts", "05_silent_misalignment", "08_everything_together"]
FIRST, *OTHERS = LEARNING


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models: `deeper` can do the sums, `stranger` has another tokenizer and knows nothing."""
    top = tmp_path_factory.mktemp("models")
    return {make.__name__: make(top / make.__name__) for make in (made_models.deeper, made_models.stranger)}


@pytest.mark.parametrize("names", [[FIRST], pytest.param(OTHERS, marks=pytest.mark.nightly)], ids=["first", "others"])
def test_learning_is_not_shown_with_a_model_that_cannot(folders, tmp_path, names):
    """Each notebook about learning ends with the reason in one line, and no verdict of another model under its name."""
    found = course.run(names, model=str(folders["stranger"]), out=tmp_path, time_limit=1800, progress=False)
    assert [each.name for each in found] == names
    for result in found:
        assert result.status == "NOT RUN", f"{result.name}: {result.reason} (see {result.html})"
        assert (
            result.reason.startswith("stranger answers 0% of the sums right") and "Next: --model tiny" in result.reason
        )
        assert result.records == []
    assert course.exit_status(found) == 3


@pytest.mark.nightly
def test_counts_are_the_models_own(folders, tmp_path):
    """Notebook 01 with three layers instead of two: the same story, in other numbers, learning included."""
    (result,) = course.run(["01"], model=str(folders["deeper"]), out=tmp_path, time_limit=1800, progress=False)
    assert result.status == "PASS", f"{result.reason} (see {result.html})"
    assert result.figures(case="notebook 01: all weights")["lost"] == 0
    frozen = result.figures(case="notebook 01: frozen")
    assert (frozen["changed"], frozen["lost"], frozen["trainable"]) == (1, 36, 37)
    assert result.figures(case="notebook 01: the method")["gradients"] == 37
