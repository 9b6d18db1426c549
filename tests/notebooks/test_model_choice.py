"""Which model learning is shown with: the one that is asked for, if it can learn; else that is said."""

import pytest

from failurelab_course import notebook
from failurelab_course.experiments import models


@pytest.fixture
def own(tmp_path):
    """A copy of the small model, as a user's own folder."""
    for part in models.load():
        part.save_pretrained(tmp_path / "own")
    return str(tmp_path / "own")


def test_a_model_that_can_learn_is_taken_and_random_weights_are_not(own, capsys):
    """The stored outputs are its. `random-0.5b` is for memory, time and placement; it is not even loaded here."""
    assert (notebook.model_path("tiny"), notebook.model_path(own)) == (models.source("tiny"), own)
    assert capsys.readouterr().out == ""
    assert notebook.model_path("random-0.5b") == models.source("tiny")
    assert capsys.readouterr().out == "random-0.5b has random weights: learning is shown with the small model, tiny\n"


@pytest.mark.parametrize(("accuracy", "says"), [(0.0, "0% .* to reinforce: "), (0.97, "97% .* something to gain: ")])
def test_a_model_that_cannot_learn_is_not_run(own, monkeypatch, capsys, accuracy, says):
    """A flat curve would be taken for the failure, of a model that knows nothing, and of one that knows all."""
    monkeypatch.setattr(models, "accuracy", lambda *_, **__: accuracy)
    with pytest.raises(notebook.NotRun, match=rf"own answers {says}.* Next: --model tiny"):
        notebook.model_path(own)
    assert notebook.model_path(own, fall_back=True) == models.source("tiny")
    assert capsys.readouterr().out.startswith(f"own answers {accuracy:.0%} of the sums right when it samples, and GRPO")
