"""A cell that is run too early is told which cell comes first; a Trainer's log is plain lines."""

import json

import pytest

from failurelab_course.notebook import order
from failurelab_course.notebook.kernel_output import EraCellError


@pytest.fixture
def cells(tmp_path, monkeypatch):
    """A notebook's file, as Jupyter names it to the kernel."""
    texts = [
        "# A story\n\n## The script",
        "%%era trl-0.14 -i seed -o reward\nimport torch as library\ntrainer = build()",
        "## Later",
        "def plot(values):\n    return values",
        "trainer.train()\nplot(reward)",
    ]
    kinds = ["markdown" if text.startswith("#") else "code" for text in texts]
    content = {"cells": [{"cell_type": kind, "source": [text]} for kind, text in zip(kinds, texts)]}
    path = tmp_path / "01.ipynb"
    path.write_text(json.dumps(content))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    return texts


def test_the_cell_that_makes_the_name_is_named(cells):
    """By its number among the code cells, its heading, and its first line."""
    advice = order._advice("plot", "", cells[4])
    assert "'plot' is made by code cell 2, under “Later”" in advice and "`def plot(values):`" in advice
    advice = order._advice("reward", "", cells[4])
    assert "code cell 1, under “The script”" in advice and "`import torch as library`" in advice
    assert "code cell 1" in order._advice("trainer", "trl-0.14", "%%era trl-0.14\ntrainer.train()")
    assert {"found", "trainer"} <= order.made_names("%%era trl-0.14,today -i found\ntrainer = 1", "today")


def test_of_several_cells_the_nearest_above_is_named(tmp_path, monkeypatch):
    """A name that is made again: the cell that comes last before the one that asks."""
    texts = ["rate = 1e-6", "rate = 1e-3", "print(rate)", "rate = 0"]
    content = {"cells": [{"cell_type": "code", "source": [text]} for text in texts]}
    path = tmp_path / "01.ipynb"
    path.write_text(json.dumps(content))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    advice = order._advice("rate", "", "print(rate)")
    assert "code cell 2" in advice and "`rate = 1e-3`" in advice


def test_a_name_of_another_kernel_is_none_of_this_one(cells):
    """What an era's cell makes and does not bring back is not here."""
    assert order._advice("trainer", "", cells[4]) == ""
    assert order._advice("plot", "trl-0.14", cells[4]) == ""


def test_what_cannot_be_known_is_not_said(cells, monkeypatch):
    """A misspelt name, and a notebook without a file here (another front end)."""
    assert order._advice("plto", "", cells[4]) == ""
    monkeypatch.setenv("JPY_SESSION_NAME", "/nowhere/01.ipynb")
    assert order._advice("plot", "", cells[4]) == ""


def test_the_error_is_still_an_error(cells):
    """In a shell: the traceback is shown, the advice under it, and the run counts as failed."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell()
    order.install(shell)
    for raised in ("plot(3)", "raise cell_error"):
        shell.user_ns["cell_error"] = EraCellError("trl-0.14", "NameError", "name 'trainer' is not defined", ["there"])
        with capture_output() as shown:
            result = shell.run_cell(raised, store_history=True)
        assert not result.success
        assert "Cells were run out of order" in shown.stdout, shown.stdout


def test_a_log_is_lines_without_a_clock(capsys):
    """A Trainer's own callbacks print what a reader looks at, no dictionaries or seconds; nothing if logging is off."""
    import types

    import transformers
    from transformers import trainer

    from failurelab_course.notebook import log_lines

    kept = trainer.PrinterCallback, trainer.DEFAULT_PROGRESS_CALLBACK
    try:
        log_lines.install()
        callback = trainer.DEFAULT_PROGRESS_CALLBACK()
        state = transformers.TrainerState(global_step=10)
        state.is_local_process_zero = True
        args = types.SimpleNamespace(logging_strategy="steps")
        callback.on_log(args, state, None, logs={"loss": 0.12345, "reward": 0.5, "train_runtime": 3.0})
        callback.on_log(args, state, None, logs={"train_runtime": 3.0})
        args.logging_strategy = "no"
        callback.on_log(args, state, None, logs={"reward": 0.7})
    finally:
        trainer.PrinterCallback, trainer.DEFAULT_PROGRESS_CALLBACK = kept
    assert capsys.readouterr().out == "step  10  loss 0.123  reward 0.5\n"
