"""Labs on a device: no script sees a GPU that was not asked for, and none passes on another device than asked."""

import json
import multiprocessing
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
        (None, "cuda", "0"),
        (None, "cuda:2", "2"),
        ("", "cuda", "0"),
        ("3,5", "cuda", "3"),
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


def test_what_a_check_on_a_gpu_has_beside_its_limits(monkeypatch, tmp_path):
    """Its imports, which a forked check does not pay, and CUDA's own memory on the machine's side."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    here, there = multiprocessing.Pipe()
    ordered = []
    for device in ("cpu", "cuda:1"):
        server = check_client.Server(None, here, tmp_path, device)
        there.send_bytes(b'{"broken": {}}')
        server.check(0, tmp_path / "train.py", MODEL, "GRPOTrainer", 240, memory_limit=1000)
        ordered.append((json.loads(there.recv_bytes()), server.longest(240)))
    (plain, within), (on_gpu, later) = ordered
    assert (plain["device"], plain["visible"], plain["time_limit"], plain["memory_limit"]) == ("cpu", "", 240, 1000)
    assert (on_gpu["device"], on_gpu["visible"]) == ("cuda", "6")
    assert on_gpu["time_limit"] > 240 and on_gpu["memory_limit"] > 1000
    assert later > within > 240


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


def test_which_labs_use_a_gpu():
    """By kind: simulated devices are the same everywhere."""
    for lab in labs.find():
        assert lab.devices == (("cpu",) if lab.kind in metrics.CPU_ONLY else ("cpu", "cuda"))
    assert {lab.kind for lab in labs.find()} - set(metrics.CPU_ONLY) == {
        *("trainer", "loop", "logits", "log_probs", "policies", "step", "weights")
    }
    modules = pathlib.Path(measure.__file__).with_name("kinds").glob("[a-z]*.py")
    assert set(metrics.CPU_ONLY) < set(metrics.KINDS) == {path.stem for path in modules} - {"products"}


def test_a_lab_that_uses_no_gpu_is_not_run_there(card):
    matrix = labs.verify(["11"], device="cuda")
    assert {(row.result, row.device) for row in matrix} == {("NOT RUN", "cuda")}
    assert "its devices are simulated, the same on every machine. Next: --device cpu" in matrix[0].reason
    assert labs.exit_status(matrix) == 3
    lab = labs.find(["11"])[0]
    assert labs.check(lab, device="cuda:1").result == "NOT RUN"


def test_auto_takes_for_each_lab_what_it_uses(card):
    first, eleventh = labs.find(["1", "11"])
    assert (labs.resolved("auto", first), labs.resolved("auto", eleventh)) == ("cuda", "cpu")
    assert labs.resolved("cuda:1", eleventh) == "cuda:1"
