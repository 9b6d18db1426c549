"""The command line: exit statuses, and one clear line for what is wrong."""

import errno
import importlib.metadata
import json
import os
import re
import sys
import types

import psutil
import pytest
from tests.files import write_program

from failurelab import failures as registry
from failurelab_course import eras
from failurelab_course.experiments import machine
from failurelab_course.notebook import kernel as kernels

NO_GPU = "device cuda is asked for, and there is none. Next: look for one"
UNKNOWN = r"ERROR unknown device '\S+'\. Next: give one of auto, cpu, cuda.*"


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ("eras create trl-0.13", 1, "ERROR unknown era 'trl-0.13': the eras are today, trl-0.14.*"),
        ("run 99 --out OUT", 1, "ERROR unknown notebook '99': the notebooks are 00_start_here, .*"),
        ("verify 99", 1, "ERROR .*01_.*"),
        ("doctor --python .", 3, "ERROR .*which python.*"),
        ("run 00 --out /proc/out", 2, "ERROR /proc/out .*--out.*"),
        ("verify 01 --junit /proc/out/a.xml", 2, "ERROR /proc/out .*--junit.*"),
        # Nine notebooks that each say NOT RUN would hide that nothing was asked; nothing is moved to the CPU either.
        ("run --device cuda --out OUT", 3, f"ERROR {NO_GPU}"),
        ("verify 01 --device cuda", 3, f"ERROR {NO_GPU}"),
        ("lab check 01 --device cuda", 3, f"ERROR {NO_GPU}"),
        ("lab check 01 --device gpu", 2, UNKNOWN),
        # A typing error must not become a run on the CPU.
        *((f"run 00 --device {word} --out OUT", 2, UNKNOWN) for word in ("gpu", "cuda:x")),
    ],
)
def test_a_call_that_cannot_be_answered_starts_nothing(failurelab, tmp_path, monkeypatch, call, status, message):
    def asked(device):
        raise machine.TierError(NO_GPU)

    monkeypatch.setattr(machine, "_asked", asked)
    out = tmp_path / "out"
    done = failurelab(*call.replace("OUT", str(out)).split())
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert re.fullmatch(message, done.stderr.strip())
    assert not out.exists()


def test_a_script_s_own_dashes_reach_it(failurelab, monkeypatch):
    """Click takes a -- away: it is the script's where it comes after the script's name."""
    asked = []
    monkeypatch.setattr("failurelab_preflight.cli.main", lambda words: asked.append(words) or 0)
    lines = [["train.py", "--steps", "--", "b"], ["--", "torchrun", "train.py"]]
    assert [failurelab("preflight", *line).returncode for line in lines] == [0, 0] and asked == lines


def test_doctor_passes_here(failurelab, monkeypatch):
    """On a machine that is set up, nothing fails, and what cannot run is NOT RUN. A wrong call is no failure."""
    memory = types.SimpleNamespace(total=16 * 10**9, available=8 * 10**9)  # other tests may hold it
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    done = failurelab("doctor")
    assert done.returncode == 0, done.stdout
    assert "PASS     Era trl-0.14" in done.stdout
    assert failurelab("no-such-command").returncode == 2


PLANTED = {
    "old GRPO": ({"trl": "0.14.0", "transformers": "4.48.3"}, {"F1", "F7"}, {"F3b"}),
    "of today": ({"trl": "1.16.0", "transformers": "5.24.0"}, set(), {"F1", "F3b", "F7"}),
    "a loop of one's own": ({"transformers": "5.24.0"}, set(), {"F1", "F3b"}),
}


@pytest.fixture
def planted(tmp_path):
    """Make a Python that has these packages, as their metadata says, and no others."""

    def make(packages):
        for name, version in packages.items():
            folder = tmp_path / "packages" / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        text = f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} -S "$@"\n'
        return write_program(tmp_path / "python", text)

    return make


@pytest.mark.parametrize("name", PLANTED)
def test_doctor_of_a_planted_environment(failurelab, planted, name):
    packages, has, has_not = PLANTED[name]
    done = failurelab("doctor", "--python", planted(packages), "--json")
    found = json.loads(done.stdout)
    failed = {each["failure"] for each in found["checks"] if each["status"] == "FAIL" and each["failure"]}
    assert has <= failed and not failed & has_not
    assert done.returncode == found["exit_status"] == int(bool(failed))
    for each in found["checks"]:
        if each["failure"] in failed:
            failure = registry.get(each["failure"])
            assert failure.fix in each["next_step"] and f"notebooks/{failure.notebook}" in each["next_step"]
            for package, version in re.findall(r"(trl|transformers) ([\d.]+) or later", each["next_step"]):
                there = packages | {package: version}
                left = {other.id for other in registry.all() if registry.affected(other, there)}
                assert failure.id not in left, f"{package} {version} does not end {failure.id}"
                assert left <= failed, f"{package} {version} leads into {left - failed}"
    if failed:
        assert found["next"][0].startswith("Best, for all of these at once: trl ")


def test_an_upgrade_that_leads_into_another_failure_is_not_offered():
    """The stack of January 2025: transformers 4.49 to 4.51 end garbage rollouts, 4.52 and 5 begin misalignment."""
    old = {"trl": "0.14.0", "transformers": "4.48.3"}
    offered = registry.upgrades(registry.get("F7"), old)
    assert any(each.startswith("transformers 4.49 or later, below 4.52 (") for each in offered)
    assert any(each.startswith("trl 0.22.2 or later (") for each in offered)  # 0.22.0 and 0.22.1 begin F21
    assert registry.affected("F3b", old | {"transformers": "5"})
    assert not any("transformers" in each.split("(")[0] for each in registry.upgrades(registry.get("F1"), old))


HALF = {"torch": "2.13.0", "transformers": "4.48.3", "trl": "0.14.0"}


@pytest.mark.parametrize(
    ("packages", "metadata", "said"),
    [
        ({"torch": "2.5.1"}, None, "transformers is not installed"),
        # Cut short, it must not count as one without trl, whose failures it may have.
        (HALF, "", "does not say its version: trl."),
        (HALF, "Metadata-Version: 2.1\nName: trl\nVersion: 0.1x4\n", "does not say its version: trl."),
    ],
)
def test_doctor_of_half_an_installation(failurelab, planted, packages, metadata, said):
    python = planted(packages)
    for file in python.parent.glob("**/trl-0.14.0.dist-info/METADATA"):
        file.write_text(metadata) if metadata else file.unlink()
    done = failurelab("doctor", "--python", python)
    assert done.returncode == 3 and said in done.stderr and "Next: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
    python.write_text("#!/bin/sh\necho 'Fatal Python error: init_fs_encoding' >&2\nexit 1\n")
    done = failurelab("doctor", "--python", python)
    assert done.returncode == 3 and "ended with status 1" in done.stderr and "init_fs_encoding" in done.stderr


def test_a_device_is_described(monkeypatch):
    """`auto` without a GPU is the CPU; a card is told as the child process would, on a machine that has one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = machine.describe("auto")
    assert found == machine.describe("cpu") and found["versions"]["torch"] == importlib.metadata.version("torch")
    assert machine.line(found).startswith(f"tier: cpu, {found['name']}, torch {found['versions']['torch']}")
    card = {"device": "cuda", "name": "NVIDIA Pretended", "driver": "580.1.2", "cuda": "13.0", "memory_gib": 79.6}
    monkeypatch.setattr(machine, "_asked", lambda device: card | {"bfloat16": False})
    said = machine.line(machine.describe("auto"))
    assert said.startswith("tier: gpu, NVIDIA Pretended, 80 GiB, bfloat16 emulated, driver 580.1.2, CUDA 13.0, torch ")


@pytest.mark.parametrize(
    ("device", "visible", "works", "gpus"),
    [("cpu", None, True, ""), ("cuda", None, True, "0,1"), ("auto", "3, 1,0", True, "3,1"), ("cuda", None, False, "")],
)
def test_two_processes_take_two_gpus_where_they_are_there(monkeypatch, device, visible, works, gpus):
    asked = []
    monkeypatch.setattr(
        machine.subprocess,
        "run",
        lambda *words, **_: asked.append(words) or types.SimpleNamespace(returncode=not works),
    )
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.two_gpus(device) == gpus and bool(asked) == (device != "cpu")


def test_what_the_machine_refuses_is_one_line(failurelab, monkeypatch):
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), "labs.json")

    def refuse():
        raise error

    monkeypatch.setattr(eras, "known", refuse)
    done = failurelab("eras", "list")
    assert done.returncode == 3
    step = "use a clone that you may write, then the same command again"
    assert done.stderr == f"ERROR {error.strerror}: labs.json. Next: {step}\n"


def test_a_disk_without_room_for_a_kernel_is_told(monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kernels.BlockingKernelClient, "write_connection_file", full)
    with pytest.raises(kernels.EraMagicError, match=r"cannot be started: .*No space left on device.*Next: "):
        kernels.EraKernel("today").run("1")
