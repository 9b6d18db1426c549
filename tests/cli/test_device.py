"""`--device`: what a command computes on is found out first, said in the results, or why it cannot be."""

import importlib.metadata
import re

import pytest

from failurelab_course.experiments import machine
from failurelab_course.notebook_runs import notebooks as course


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        # Nine notebooks that each say NOT RUN would hide that nothing was asked; nothing is moved to the CPU either.
        ("run --device cuda --out OUT", 3, r"ERROR device cuda is asked for, and .*Next: .*or run with --device cpu"),
        ("verify 01 --device cuda", 3, "ERROR device cuda is asked for, and .*Next: .*"),
        ("lab check 01 --device cuda", 3, "ERROR device cuda is asked for, and .*Next: .*"),
        ("run 99 --out OUT", 1, r"ERROR unknown notebook '99': the notebooks are 00_start_here, .*"),
        ("lab watch 01 --device gpu", 3, "ERROR unknown device 'gpu'. Next: give one of auto, cpu, cuda.*"),
        # A typing error must not become a run on the CPU.
        *((f"run 00 --device {word} --out OUT", 2, None) for word in ("gpu", "cuda:x", "tpu", "CPU")),
    ],
)
def test_a_call_that_cannot_be_answered_starts_nothing(
    failurelab, tmp_path, monkeypatch, no_gpu, call, status, message
):
    """The error is one line, and nothing is written."""

    def asked(device):
        raise machine.DeviceError(no_gpu)

    monkeypatch.setattr(machine, "_asked", asked)
    out = tmp_path / "out"
    done = failurelab(*call.replace("OUT", str(out)).split())
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    if message:
        assert re.fullmatch(message, done.stderr.strip())
    else:
        assert "no device. Next: give auto, cpu, cuda" in " ".join(done.stderr.replace("│", " ").split())
    assert not out.exists()


@pytest.fixture(scope="module")
def no_gpu():
    """What a machine says of `cuda` on which every GPU is hidden: a process is asked."""
    with pytest.MonkeyPatch.context() as changed, pytest.raises(machine.DeviceError) as error:
        changed.setenv("CUDA_VISIBLE_DEVICES", "")
        machine.describe("cuda")
    return str(error.value)


def test_a_device_is_described(monkeypatch):
    """`auto` without a GPU is the CPU, and says so; another word is refused here too."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.describe("auto") == machine.describe("cpu")
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
