"""On every way from a model to a trainer, in this stack: repairs hold, and measurements measure what is trained."""

import itertools

import peft
import pytest
from packaging.version import Version

from failurelab_course.experiments import adapter_paths

PATHS, QUESTIONS = adapter_paths.available(), adapter_paths.QUESTIONS
HOOK = "forward pre-hook on the model"


@pytest.mark.parametrize("before", [True, False], ids=["before the trainer", "after"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_it_holds(question, path, before, tmp_path):
    """Asked by running. Up to PEFT 0.20 an adapter's wrapper calls the model's forward, and skips its hooks."""
    folders = (tmp_path / str(number) for number in itertools.count())
    result = QUESTIONS[question](lambda: adapter_paths.make(path, next(folders)), before)
    skipped = question == HOOK and path != "plain" and Version(peft.__version__) < Version("0.21")
    assert result.holds is not skipped, result.figure
