"""A simulated node: what a command starts, what its processes see, and whether a 4-bit model is whole in each."""

import os

import pytest
import torch

from failurelab.simulate.cuda import Cuda, visible
from failurelab.simulate.node import CommandError, process, started
from failurelab_course.experiments import models
from failurelab_course.labs.checker import measure


@pytest.mark.parametrize(
    "command, count, launched, variables",
    [
        ("python train.py", 1, False, {}),
        ("CUDA_VISIBLE_DEVICES=1 python -u train.py", 1, False, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("accelerate launch train.py", 2, True, {}),
        ("accelerate launch --num_processes 1 train.py", 1, False, {}),
        ("accelerate launch --gpu_ids 1 train.py", 1, False, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("env A=1 torchrun --nproc_per_node 2 train.py", 2, True, {"A": "1"}),
        ("torchrun --nproc-per-node=gpu train.py", 2, True, {}),
        ("python -m torch.distributed.run --nproc_per_node 1 train.py", 1, True, {}),
    ],
)
def test_launchers_read_their_own_options(command, count, launched, variables):
    """One process is numbered by torchrun and not by accelerate launch, which starts it plainly."""
    found = started(command, 2)
    assert (found.count, found.launched, found.variables) == (count, launched, variables)


@pytest.mark.parametrize("command", [None, "bash run.sh", "python -m train", "python 'train.py", "torchrun --n"])
def test_another_command_is_named(command):
    with pytest.raises(CommandError, match="command"):
        started(command, 2)


@pytest.mark.parametrize("value, count", [(None, 2), ("0", 1), ("0,1", 2), ("1,5,0", 1), ("", 0), ("-1", 0)])
def test_visible_devices(value, count):
    """CUDA reads the list up to the first device that is not there."""
    assert visible(value, 2) == count


def test_the_variable_is_read_until_the_first_use(monkeypatch):
    """Counting is no use; asking for the current device is."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda = Cuda(2)
    assert (cuda.device_count(), cuda.is_initialized()) == (2, False)
    for visible_now in ("0", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_now)
        assert (cuda.device_count(), cuda.current_device()) == (1, 0)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        cuda.set_device(1)


def test_a_process_leaves_no_trace(monkeypatch):
    from accelerate import PartialState

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")

    def state():
        return dict(os.environ), torch.cuda.device_count, dict(PartialState._shared_state), PartialState.__init__

    before = state()
    with process(started("torchrun --nproc_per_node 2 train.py", 2), 1, 2):
        assert (os.environ["LOCAL_RANK"], torch.cuda.current_device()) == ("1", 0)
        assert PartialState().local_process_index == torch.cuda.current_device() == 1
        os.environ["LEFT"] = "behind"
    assert state() == before


SCRIPT = """
import os
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
{top}
COMMAND = {command!r}


def prepare(model_path, output_dir):
    {first}
    config = TrainingArguments(output_dir, report_to=[])
    own = PartialState().local_process_index
    four_bit = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=four_bit, device_map={{"": {at}}})
    {then}
    return model, config
"""
PLAIN, LAUNCHED = "python train.py", "accelerate launch --num_processes 2 train.py"


@pytest.fixture
def measured(tmp_path):
    def run(command, at="0", *, first="pass", then="pass", top="", error=""):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(command=command, at=at, first=first, then=then, top=top))
        made = measure.run(script, models.path("tiny"), tmp_path / "output", "prepare", "node")
        assert bool(made.traceback) is bool(error) and error in made.traceback and made.environment == ""
        return made.refused or made.metrics

    return run


def test_where_each_process_sees_one_gpu_its_index_is_no_device(measured):
    """A scheduler shows each process a GPU of its own, and all are number 0: the index of rank 1 names no card."""
    found = measured("CUDA_VISIBLE_DEVICES=1 " + LAUNCHED, "PartialState().device")
    assert (found["processes"], found["devices_seen"]) == (2, 1)
    assert (found["ranks_refused"], found["tensors_elsewhere"], found["layers_refused"]) == (0, 0, 0)
    measured("CUDA_VISIBLE_DEVICES=1 " + LAUNCHED, "own", error="invalid device ordinal (device 1, and 1 are visible)")


def test_what_is_no_answer_is_refused(measured):
    assert "the command 'make' is none" in measured("make")
    assert "not the model and the config" in measured(PLAIN, then="return model")
    assert "no trainer's config" in measured(PLAIN, then="config = None")
    assert "not the model in model_path" in measured(PLAIN, then="model = model.lm_head")
