"""Labs on a device: no script sees a GPU that was not asked for, and none passes on another device than asked."""

import os
import pathlib

import pytest
import torch

from failurelab_course import eras
from failurelab_course.experiments import machine
from failurelab_course.labs import metrics
from failurelab_course.labs import verify as labs
from failurelab_course.labs.checker import client as check_client
from failurelab_course.labs.checker import measure, scorer

MODEL = eras.root() / "models" / "tiny-qwen2"
LEFT = """
def train(model, tokenizer, steps):
    model.to("meta")
"""


@pytest.fixture
def card(monkeypatch):
    """A machine on which `cuda` resolves; nothing here gets as far as using it."""
    monkeypatch.setattr(machine, "describe", lambda device: {"device": "cuda" if device == "auto" else device})


@pytest.mark.parametrize(
    ("visible", "device", "shown"),
    [
        (None, "cuda:2", "2"),
        ("", "cuda", "0"),
        ("3, 5", "cuda:1", "5"),
        ("GPU-8932f937,MIG-1", "cuda:1", "MIG-1"),
    ],
)
def test_a_check_is_shown_one_gpu(monkeypatch, visible, device, shown):
    """With two, transformers would wrap nn.DataParallel around the model; numbers are those that this process sees."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert check_client.one_gpu(device) == shown


def test_a_model_that_a_loop_moves_away_is_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LEFT)
    made = measure.run(script, MODEL, tmp_path / "out", "train", "loop")
    assert made.refused.startswith("the trained model is on meta, and this check is on cpu: ")


def test_the_scorer_sees_no_gpu(monkeypatch):
    """Scores are the CPU's on every device, and CUDA cannot be used in a fork."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def accuracy(model, tokenizer, *question):
        return [os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_available()]

    monkeypatch.setattr(scorer, "_accuracy", accuracy)
    with scorer.start(torch.nn.Linear(1, 1), None) as score:
        assert score() == ["", False]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_which_labs_use_a_gpu(card):
    """By kind: simulated devices are the same everywhere. Each kind has its module."""
    first, eleventh = labs.find(["1", "11"])
    assert (first.devices, eleventh.devices) == (("cpu", "cuda"), ("cpu",))
    assert (labs.resolved("auto", first), labs.resolved("auto", eleventh)) == ("cuda", "cpu")
    assert labs.resolved("cuda:1", eleventh) == "cuda:1"
    modules = pathlib.Path(measure.__file__).with_name("kinds").glob("[a-z]*.py")
    assert set(metrics.CPU_ONLY) < set(metrics.KINDS) == {path.stem for path in modules} - {"products"}


def test_a_lab_that_uses_no_gpu_is_not_run_there(card):
    matrix = labs.verify(["11"], device="cuda")
    assert {(row.result, row.device) for row in matrix} == {("NOT RUN", "cuda")}
    assert "its devices are simulated, the same on every machine. Next: --device cpu" in matrix[0].reason
