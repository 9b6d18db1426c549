"""`failurelab run --device`: what a run computes on is found out first, said in the results, or why it cannot be."""

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

from failurelab_course.experiments import machine
from failurelab_course.notebook_runs import notebooks as course


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        # Nine notebooks that each say NOT RUN would hide that nothing was asked.
        ("--device cuda", 3, r"ERROR device cuda is asked for, and .*Next: .*or run with --device cpu"),
        ("99", 1, r"ERROR unknown notebook '99': the notebooks are 00_start_here, .*"),
        # A typing error must not become a run on the CPU.
        *((f"00 --device {word}", 2, None) for word in ("gpu", "cuda:x", "tpu", "CPU")),
    ],
)
def test_a_call_that_cannot_be_answered_starts_nothing(tmp_path, arguments, status, message):
    """The error is one line, and nothing is written. Every GPU is hidden."""
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "failurelab", "run", *arguments.split(), "--out", str(out)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stderr
    if message:
        assert re.fullmatch(message, done.stderr.strip())
    else:
        assert "no device. Next: give auto, cpu, cuda" in " ".join(done.stderr.replace("│", " ").split())
    assert not out.exists()


def test_a_device_is_described(monkeypatch):
    """`auto` without a GPU is the CPU, and says so; another word is refused here too."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.describe("auto") == machine.describe("cpu")
    with pytest.raises(machine.DeviceError, match="cuda is asked for"):
        machine.describe("cuda")
    found = machine.describe()
    assert found["device"] == "cpu" and found["driver"] == "" and found["memory_gib"] is None
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert machine.line(found).startswith(f"tier: cpu, {found['name']}, torch {found['versions']['torch']}")
    with pytest.raises(machine.DeviceError, match="unknown device 'gpu'"):
        machine.describe("gpu")


def test_a_gpu_is_told_with_its_driver(monkeypatch):
    """As the child process would answer on a machine that has one."""
    card = {"device": "cuda", "name": "NVIDIA Pretended", "driver": "580.1.2", "cuda": "13.0", "memory_gib": 79.6}
    monkeypatch.setattr(machine, "_asked", lambda device: dict(card))
    found = machine.describe("auto")
    assert machine.line(found).startswith("tier: gpu, NVIDIA Pretended, 80 GiB, driver 580.1.2, CUDA 13.0, torch ")
    assert course.to_json([], found)["ran_on"] == found
