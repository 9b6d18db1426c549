"""The quiet first cell, figures and verdict tables, in a real kernel."""

import base64
import io
import json
import os
import re
import subprocess
import sys

import nbformat
import pytest

from failurelab_course import eras
from failurelab_course.notebook_runs import runs

SETUP = "from failurelab_course.notebook import display as notebook\ndevice = notebook.setup(seed=seed)"
DRAWS = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())"
SHOW = """
from matplotlib import pyplot
figure, axes = pyplot.subplots()
axes.plot([1, 2, 4])
notebook.show(figure, alt="A line that rises")
"""
TABLE = """
import numpy, torch
notebook.verdict_table([
    ("tensors without a gradient", 0, "0", "1 or more", True),
    ("reward <gain>", 0.204, "0.1 or more", "below", numpy.bool_(False)),
    ("on a GPU", torch.tensor(3), 1e-6, "other", None),
], columns=("measured", "found", "healthy", "red flag", "verdict"))
"""


@pytest.fixture(scope="module")
def executed(plant_once, tmp_path_factory):
    """A notebook that uses all of it, twice with the same seed; and what a GPU that is not there makes of one."""
    plant_once("00_first", SETUP, DRAWS, SHOW, TABLE, "%era_stop", "torch.get_num_threads()", SETUP, DRAWS, SHOW)
    plant_once("01_gpu", SETUP.replace("seed)", "seed, device='cuda')"))
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("CUDA_VISIBLE_DEVICES", "")
        out = tmp_path_factory.mktemp("run")
        return runs.run(folder=plant_once.folder, out=out, seed=3, time_limit=600)


def outputs(result):
    cells = nbformat.read(result.copy, as_version=4).cells
    return [cell.outputs for cell in cells if cell.cell_type == "code"][2:]


@pytest.mark.slow
def test_the_first_cell_is_quiet_and_makes_runs_repeat(executed):
    """With one seed the same numbers are drawn again and the same bytes put out; the set-up itself says nothing."""
    assert executed[0].status == "PASS", executed[0].reason
    found = outputs(executed[0])
    assert found[0] == found[6] == []
    assert re.match(r"0\.\d+ 0\.\d+ 0\.\d+\n$", found[1][0].text)
    assert found[1:3] == found[7:9]
    assert found[5][0].data["text/plain"] == "1", "one thread, so that sums are added in one order everywhere"


def test_a_figure_has_a_text_and_is_small(executed):
    from PIL import Image

    (shown,) = outputs(executed[0])[2]
    assert shown.metadata["image/png"]["alt"] == shown.data["text/plain"] == "A line that rises"
    picture = base64.b64decode(shown.data["image/png"])
    assert len(picture) < 20_000 and b"matplotlib" not in picture.lower()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    assert image.getpixel((1, 1)) == (255, 255, 255), "its own white ground, for the dark theme"
    assert 700 <= image.width <= 800
    assert 'alt="A line that rises"' in executed[0].html.read_text()


def test_a_verdict_table_says_its_verdicts_in_words(executed):
    """As text and as HTML: a mark, a word and a colour, so that none of them is needed."""
    (shown,) = outputs(executed[0])[3]
    assert shown.data["text/plain"].splitlines() == [
        "measured                    found  healthy      red flag   verdict",
        "--------------------------  -----  -----------  ---------  ----------",
        "tensors without a gradient  0      0            1 or more  ✓ healthy",
        "reward <gain>               0.20   0.1 or more  below      ✗ red flag",
        "on a GPU                    3      1e-06        other      – not run",
    ]
    html = shown.data["text/html"]
    assert "reward &lt;gain&gt;" in html and html.count("<tr>") == 4
    for words in ("✓ healthy", "✗ red flag", "– not run"):
        assert re.search(rf'style="background:#\w+;color:#\w+;[^"]*">{words}</span>', html)


def test_without_a_gpu_a_notebook_on_cuda_is_not_run(executed):
    result = executed[1]
    assert result.status == "NOT RUN" and result.reason.startswith("device cuda is asked for")
    assert "Next: " in result.reason
    (shown,) = outputs(result)[0]
    assert shown.traceback == [f"NOT RUN: {result.reason}"]


@pytest.mark.slow
def test_the_set_up_works_in_an_era():
    """In an era's kernel the same line makes it quiet and seeds it, and starts no era of its own."""
    era = eras.find("trl-0.14")
    code = (
        "import json, sys; from failurelab_course import notebook; notebook.setup(seed=3); import torch, matplotlib;"
        "print(json.dumps([torch.initial_seed(), torch.get_num_threads(), matplotlib.rcParams['figure.figsize'],"
        "'failurelab_course.notebook.magics' in sys.modules]))"
    )
    done = eras.run(era, ["-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3, 1, [7.5, 3.6], False]


@pytest.mark.slow
def test_where_auto_is_the_cpu_a_line_says_why():
    code = "from failurelab_course import notebook; print(notebook.setup(device='auto')); notebook.setup(device='cpu')"
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    line, device = done.stdout.splitlines()
    assert line.startswith("device auto is the CPU: ") and "Next: " in line and device == "cpu"


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
