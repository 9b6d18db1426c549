"""On every way from a model to a trainer, in this stack: repairs hold, and measurements measure what is trained."""

import itertools

import peft
import pytest
from packaging.version import Version
from tests.cli.benchmark_scripts import load

adapter_paths = load("adapter_paths")
PATHS, QUESTIONS = adapter_paths.available(), adapter_paths.QUESTIONS
HOOK = "forward pre-hook on the model"
# Every question on every path; asked before the trainer is made and after it in turn, so that each path has both.
CASES = [
    (question, path, (row + column) % 2 == 0)
    for row, question in enumerate(QUESTIONS)
    for column, path in enumerate(PATHS)
]


@pytest.mark.parametrize(("question", "path", "before"), CASES)
def test_it_holds(question, path, before, tmp_path):
    """Asked by running. Up to PEFT 0.20 an adapter's wrapper calls the model's forward, and skips its hooks."""
    folders = (tmp_path / str(number) for number in itertools.count())
    result = QUESTIONS[question](lambda: adapter_paths.make(path, next(folders)), before)
    skipped = question == HOOK and path != "plain" and Version(peft.__version__) < Version("0.21")
    assert result.holds is not skipped, result.figure
