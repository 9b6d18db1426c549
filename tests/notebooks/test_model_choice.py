"""Which model learning is shown with: the one that is asked for, if it can learn; else that is said."""

import pytest
from made_models import with_three_layers

from failurelab_course.experiments import models
from failurelab_course.notebook import display as notebook
from failurelab_course.notebook import model_choice


@pytest.fixture(scope="module")
def ignorant(tmp_path_factory):
    """A folder in the hub's format, with weights that know nothing."""
    folder = tmp_path_factory.mktemp("models") / "ignorant"
    with_three_layers().save_pretrained(folder)
    models.load()[1].save_pretrained(folder)
    return str(folder)


def test_the_small_model_is_taken_without_a_word(capsys):
    """The stored outputs are its."""
    assert model_choice.model_path("tiny") == models.source("tiny")
    assert capsys.readouterr().out == ""


def test_random_weights_learn_nothing_and_that_is_said(capsys):
    """`random-0.5b` is for memory, time and placement; it is not even loaded here."""
    assert model_choice.model_path("random-0.5b") == models.source("tiny")
    assert capsys.readouterr().out == "random-0.5b has random weights: learning is shown with the small model, tiny\n"


def test_a_model_that_can_is_taken(tmp_path):
    """A copy of the small model, as a user's own folder."""
    for part in models.load():
        part.save_pretrained(tmp_path)
    assert model_choice.model_path(str(tmp_path)) == str(tmp_path)


def test_a_model_that_cannot_is_not_run(ignorant, capsys):
    """A flat curve of such a model would be taken for the failure."""
    with pytest.raises(notebook.NotRun, match=r"ignorant answers 0% .* to reinforce: .* Next: --model tiny"):
        model_choice.model_path(ignorant)
    assert model_choice.model_path(ignorant, fall_back=True) == models.source("tiny")
    assert capsys.readouterr().out.startswith("ignorant answers 0% of the sums right when it samples, and GRPO needs")


def test_a_model_that_can_all_is_not_run(ignorant, monkeypatch):
    """Nothing is left to gain: the healthy run would not climb either."""
    monkeypatch.setattr(models, "accuracy", lambda *_, **__: 0.97)
    with pytest.raises(notebook.NotRun, match=r"97% .* something to gain"):
        model_choice.model_path(ignorant)
