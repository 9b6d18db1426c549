"""Copies of labs that tests may change."""

import shutil

import pytest
from tests.files import edit

from failurelab_course import eras
from failurelab_course.labs import verify as labs

LAB = "01_frozen_embeddings"


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A copy of lab 01, with a state file of its own."""
    monkeypatch.setenv("FAILURELAB_STATE", str(tmp_path / "labs.json"))
    return labs.load(shutil.copytree(eras.root() / "labs" / LAB, tmp_path / LAB))


def shorten(folder):
    """Let a copy of lab 01 have six steps: nothing can be learned in them, but every mistake shows."""
    for name, *edits in (
        ("start.py", ("max_steps=70", "max_steps=6"), ("warmup_steps=7", "warmup_steps=1")),
        ("lab.toml", ("steps_done >= 70", "steps_done >= 6")),
    ):
        (folder / name).write_text(edit((folder / name).read_text(), *edits))
    return folder
