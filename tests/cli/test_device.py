"""`failurelab run --device`: what a run computes on is found out first, said in the results, or why it cannot be."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from failurelab_course.experiments import machine as ran_on
from failurelab_course.runs import notebooks as course
from failurelab_course.runs import results


def run(*arguments, **environment):
    """Run the command, with every GPU hidden."""
    return subprocess.run(
        [sys.executable, "-m", "failurelab", "run", *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_cuda_without_a_gpu_is_one_line_and_status_3(tmp_path):
    """Nine notebooks that each say NOT RUN would hide that nothing was asked; and nothing may be started."""
    done = run("--device", "cuda", "--out", str(tmp_path / "out"))
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 3, done.stderr
    assert line.startswith("ERROR device cuda is asked for, and ") and "Next: " in line
    assert line.endswith("or run with --device cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "tpu", "CPU"])
def test_another_word_is_a_wrong_call(device):
    """A typing error must not become a run on the CPU."""
    done = run("00", "--device", device)
    assert done.returncode == 2
    assert "no device. Next: give auto, cpu, cuda" in " ".join(done.stderr.replace("│", " ").split())


def test_a_device_is_described():
    """`auto` without a GPU is the CPU, and says so; another word is refused here too."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        assert ran_on.describe("auto") == ran_on.describe("cpu")
        with pytest.raises(course.DeviceError, match="cuda is asked for"):
            ran_on.describe("cuda")
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    found = ran_on.describe()
    assert found["device"] == "cpu" and found["driver"] == "" and found["memory_gib"] is None
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert ran_on.line(found).startswith(f"tier: cpu, {found['name']}, torch {found['versions']['torch']}")
    with pytest.raises(course.DeviceError, match="unknown device 'gpu'"):
        ran_on.describe("gpu")


def test_a_gpu_is_told_with_its_driver(monkeypatch):
    """As the child process would answer on a machine that has one."""
    card = {"device": "cuda", "name": "NVIDIA Pretended", "driver": "580.1.2", "cuda": "13.0", "memory_gib": 79.6}
    monkeypatch.setattr(ran_on, "_asked", lambda device: dict(card))
    found = ran_on.describe("auto")
    assert ran_on.line(found).startswith("tier: gpu, NVIDIA Pretended, 80 GiB, driver 580.1.2, CUDA 13.0, torch ")
    assert results.to_json([], found)["ran_on"] == found
