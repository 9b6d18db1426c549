"""`failurelab doctor` as a nervous participant reads it the evening before: a verdict, and a command for each fault.

Faults are planted: a full disk, little memory, a broken era, an old Python, a GPU that does not work.
Whatever breaks, the other checks are asked, and nothing is a traceback.
"""

import ast
import collections
import json
import os
import pathlib
import sys
import types

import psutil
import pytest
from tests.files import write_program

from failurelab import __main__
from failurelab import checks as checking
from failurelab.failures import versions as library_versions
from failurelab_course import doctor, eras
from failurelab_course.experiments import devices
from failurelab_course.notebook import kernel as kernels

GB = 10**9
Usage = collections.namedtuple("Usage", "total used free")
Memory = collections.namedtuple("Memory", "total available")


def by_name(checks):
    return {each.name: each for each in checks}


@pytest.fixture
def quick(monkeypatch):
    """The checks of this machine without a real kernel: that one is started by `test_doctor_passes_here`."""
    kernel = types.SimpleNamespace(run=lambda code, fetch: {"answer": "0.14.0"}, stop=lambda: None)
    monkeypatch.setattr(kernels, "EraKernel", lambda era: kernel)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(16 * GB, 8 * GB))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    return monkeypatch


def test_what_is_to_do_is_counted_and_each_is_said_once(quick):
    ready = doctor.check_course()
    assert checking.exit_status(ready) == 0 and checking.steps(ready) == []
    checks = [
        checking.Check("Era a", checking.FAIL, "missing", "make setup"),
        checking.Check("Era b", checking.FAIL, "missing", "make setup"),
        checking.Check("Disk", checking.FAIL, "full", "free 1 GB"),
        checking.Check("GPU", checking.NOT_RUN, "none", "install a driver"),
    ]
    assert checking.to_json(checks)["next"] == ["make setup", "free 1 GB"]
    assert checking.text(checks).startswith("NOT READY: 2 things to do")
    checks = [
        checking.Check("F1 a", checking.FAIL, "", "upgrade", "F1"),
        checking.Check("F2 b", checking.PASS, "", "", "F2"),
        checking.Check("F3 c", checking.IF_YOURS, "", "mend", "F3"),
    ]
    assert "1 of the 3 failures" in checking.verdict(checks)
    assert "Code of your own may meet F3" in checking.verdict(checks[1:]) and checking.exit_status(checks[1:]) == 0


def without_deepspeed(quick):
    """Some notebooks would fail, so that is said before."""
    there = [each for each in doctor.importlib.metadata.distributions() if each.name != "deepspeed"]
    quick.setattr(doctor.importlib.metadata, "distributions", lambda: there)


def memory(total, free):
    return lambda quick: quick.setattr(psutil, "virtual_memory", lambda: Memory(total, free))


@pytest.mark.parametrize(
    ("name", "fault", "said", "step"),
    [
        (
            "Disk",
            lambda quick: quick.setattr(doctor.shutil, "disk_usage", lambda place: Usage(10 * GB, 10 * GB, 0)),
            "0.0 GB free in",
            "free 1 GB in",
        ),
        ("Packages", without_deepspeed, "deepspeed missing, the lock says", "setup"),
        # Too small a machine, and one that is full: different things to do.
        ("Memory", memory(2 * GB, GB), "the course takes 4 GB", "larger machine"),
        ("Memory", memory(8 * GB, GB // 2), "0.5 GB of it free", "close what"),
    ],
)
def test_a_fault_is_named_with_what_to_do(quick, name, fault, said, step):
    fault(quick)
    checks = doctor.check_course()
    found = by_name(checks)[name]
    assert found.status == checking.FAIL and said in found.detail and step in found.next_step
    assert checking.text(checks).startswith("NOT READY: ")


def test_a_broken_era(tmp_path, monkeypatch):
    top = tmp_path / "course"
    top.mkdir()
    for name in ("helpers", "models", "eras"):
        (top / name).symlink_to(eras.root() / name)
    real = eras.find("trl-0.14")
    marker = json.dumps(real.marker)
    folder = top / ".eras" / "trl-0.14"
    write_program(folder / "bin" / "python", "#!/bin/sh\nexit 1\n")
    (folder / eras.MARKER).write_text(marker)
    monkeypatch.setenv("FAILURELAB_ROOT", str(top))
    found = by_name(doctor.check_course())
    kernel = found["Kernel of trl-0.14"]
    assert kernel.status == checking.FAIL and "did not start (exit status 1)" in kernel.detail
    assert "Next:" not in kernel.detail
    assert "eras remove trl-0.14, then" in kernel.next_step and "eras create trl-0.14" in kernel.next_step
    assert found["Era trl-0.15"].status == checking.FAIL and found["Python"].status == checking.PASS


def test_a_gpu_that_does_not_work(quick, tmp_path):
    write_program(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'Some GPU, 8192 MiB'\n")
    quick.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    quick.setattr(devices, "gpu_problem", lambda: "the driver is too old. Next: a newer driver")
    checks = doctor.check_course()
    gpu = by_name(checks)["GPU"]
    assert gpu.status == checking.NOT_RUN and "the driver is too old" in gpu.detail
    assert "for the GPU: a newer driver" in gpu.next_step and checking.exit_status(checks) == 0


def test_no_era_at_all(quick, tmp_path):
    """Nothing was set up: one thing to do, and not five; the command works where it was asked."""
    quick.chdir(tmp_path)
    quick.setattr(eras.Era, "status", property(lambda era: "missing"))
    checks = doctor.check_course()
    assert by_name(checks)["Kernel"].status == checking.FAIL
    assert checking.text(checks).splitlines()[0] == "NOT READY: 1 thing to do before the course, then ask again."
    assert checking.steps(checks) == [f"make -C {eras.root()} setup"]


def test_a_check_that_breaks_is_a_failed_check():
    def broken():
        raise RuntimeError("of its own\nand more")

    found = doctor._check("Thing", broken)
    assert (found.status, found.detail) == (checking.FAIL, "RuntimeError: of its own") and found.next_step


@pytest.mark.parametrize(
    ("versions", "id", "status"),
    [
        ({"trl": "0.14.0", "accelerate": "1.3.0", "transformers": "4.48.3"}, "F5", "FAIL"),  # the report's stack
        ({"trl": "0.15.2", "accelerate": "1.3.0", "transformers": "4.48.3"}, "F5", "IF YOURS"),
        ({"trl": "1.16.0", "accelerate": "1.15.0", "transformers": "5.24.0"}, "F5", "PASS"),
    ],
)
def test_a_script_of_ones_own_is_no_pass(monkeypatch, versions, id, status):
    """A PASS with a "but" is none: what only code of one's own meets has a word of its own."""
    monkeypatch.setattr(library_versions, "ask_versions", lambda python: versions)
    check = next(check for check in library_versions.check_python("python") if check.failure == id)
    assert check.status == status and bool(check.next_step) is (status != "PASS")


def test_lines_fit_the_terminal_and_code_stays_whole(monkeypatch):
    """A reader copies code from it: no line is broken inside a call or a dict."""
    monkeypatch.setenv("COLUMNS", "70")
    step = "F1 a\nupgrade: trl 0.22.0 or later (it does so by itself, whatever the options say, from then on)\n"
    step += "in place: model.enable_input_require_grads(), or gradient_checkpointing_kwargs={'use_reentrant': False}"
    text = checking.text(
        [checking.Check("F1 a", checking.FAIL, "trl 0.14.0: " + "frozen embeddings, " * 9, step, "F1")]
    )
    assert "gradient_checkpointing_kwargs={'use_reentrant': False}" in text and "\n      - upgrade: trl" in text
    assert max(len(line) for line in text.splitlines()) <= 70


def test_an_old_python_is_one_line(monkeypatch, capsys):
    for path in (pathlib.Path(__main__.__file__), pathlib.Path(__main__.__file__).with_name("__init__.py")):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 7))
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert __main__.main() == 2
    said = capsys.readouterr().err
    assert "the course needs 3.11 to 3.13. Next:" in said and len(said.splitlines()) == 1


def test_outside_of_the_course(failurelab, monkeypatch, tmp_path):
    monkeypatch.setenv("FAILURELAB_ROOT", str(tmp_path))
    done = failurelab("doctor")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "cd into your clone" in done.stderr
