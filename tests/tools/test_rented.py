"""tools/rented.py, as a person runs it: copied to an empty folder, with stand-ins for the card, uv and each step.

The stand-in for torch finds a card or says why not. Of all steps, which only print what they were asked, a benchmark
leaves the CPU's file as the card's, so that all of the CPU's predictions hold. With a real card: docs/gpu.md.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile

import pytest
from tools import gpu, rented

from failurelab_course import eras

ROOT = eras.root()
TORCH = """
import os
__version__, wrong = "2.9.1", os.environ.get("STAND_IN_WRONG", "")
class version:
    cuda = None if wrong == "no CUDA" else "13.0"
class device:
    def __init__(self, name):
        self.type = str(name).partition(":")[0]
class cuda:
    device_count, get_device_name = staticmethod(lambda: 1), staticmethod(lambda *_: "NVIDIA Pretended")
    mem_get_info = staticmethod(lambda *_: (2**33 + 2**30, 2**34) if wrong != "small" else (2**30, 2**31))
    @staticmethod
    def is_available():
        return True
class zeros:
    def __init__(self, *_, **__): pass
    def add_(self, _): return self
    def item(self): return 1
"""
# `python -m venv` makes an environment whose interpreter is the stand-in for a step.
VENV = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[-1])
(folder / "lib/python3/site-packages").mkdir(parents=True, exist_ok=True)
(folder / "bin").mkdir(exist_ok=True)
if not (folder / "bin/python").exists():
    os.symlink(os.environ["STAND_IN_STEP"], folder / "bin/python")
"""
STEP = """
import os, pathlib, shutil, signal, sys
words = sys.argv[1:]
line = " ".join(words)
if words[0] == "-c":  # DeepSpeed's operation
    sys.exit()
with open(os.environ["STAND_IN_LOG"], "a") as log:
    log.write(line + "\\n")
cut = pathlib.Path(os.environ["STAND_IN_LOG"]).with_name("cut")
if cut.exists() and cut.read_text() in line:
    cut.unlink()
    os.kill(os.getppid(), signal.SIGKILL)
    sys.exit("cut off")  # nobody is left to end it
if words[0].startswith("benchmarks/"):
    measured = pathlib.Path("evidence/cpu", pathlib.Path(words[0]).with_suffix(".json").name)
    if measured.stem == "hosted":
        print("NOT RUN it needs another card")
        sys.exit(4)
    shutil.copy(measured, words[words.index("--out") + 1])
print("fine")
"""
UV = """#!/bin/sh
echo "$@" >> "$STAND_IN_UV"
if [ -n "$STAND_IN_OFFLINE" ]; then echo "error: Failed to fetch: dns error" >&2; exit 1; fi
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The course as a repository's host packs it; of notebooks and labs only their names count here."""
    top = tmp_path_factory.mktemp("packed") / "course-main"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "corpus", "training_runs", "atlas")
    for name in ("tools", "helpers", "eras", "benchmarks", "evidence/cpu", "evidence/h100"):
        shutil.copytree(ROOT / name, top / name, ignore=ignore)
    for path in (*(ROOT / "notebooks").glob("[0-9]*"), *(ROOT / "labs").glob("[0-9]*")):
        (top / path.relative_to(ROOT)).mkdir(parents=True)
    made = top.with_name("course.tar.gz")
    with tarfile.open(made, "w:gz", compresslevel=1) as packed:
        packed.add(top, top.name)
    return made


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A rented machine's folder, with the file in it; `machine(words)` runs it to its end."""
    step = f"#!{sys._base_executable} -S\n{STEP}"
    for name, text in (("torch.py", TORCH), ("venv.py", VENV), ("uv", UV), ("step", step)):
        (tmp_path / "stand_in").mkdir(exist_ok=True)
        (tmp_path / "stand_in" / name).write_text(text)
        (tmp_path / "stand_in" / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(rented.__file__, home)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("FAILURELAB", "CUDA"))}
    variables |= {
        "PYTHONPATH": str(tmp_path / "stand_in"),
        "PATH": f"{tmp_path / 'stand_in'}{os.pathsep}{os.environ['PATH']}",
        "STAND_IN_LOG": str(tmp_path / "asked"),
        "STAND_IN_UV": str(tmp_path / "uv.log"),
        "STAND_IN_STEP": str(tmp_path / "stand_in" / "step"),
    }

    def run(*words, **more):
        command = [sys._base_executable, "rented.py", *words]  # without libraries, and without a uv beside it
        return subprocess.run(command, cwd=home, env=variables | more, capture_output=True, text=True)

    run.home, run.asked, run.uv = home, tmp_path / "asked", tmp_path / "uv.log"
    return run


@pytest.mark.slow
def test_all_parts_run_and_one_archive_is_left(machine, archive):
    """Cut off in the middle of the sixth part, it goes on there, and nothing runs twice; the page is in the archive."""
    machine.asked.with_name("cut").write_text("textbook.py")
    first = machine("--course", str(archive), "--name", "a100")
    assert first.returncode == -signal.SIGKILL
    before = machine.asked.read_text().splitlines()
    packed = machine.home / "evidence-a100.tar.xz"
    with tarfile.open(packed) as half:  # what has ended can be sent already
        ended = json.load(half.extractfile("a100/steps.json"))
    assert {step["part"] for step in ended.values()} == {1, 2, 3, 4, 5}
    second = machine("--name", "a100")  # the course is there now
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines()[-1].startswith(f"all 8 parts have ended. Next: send {packed}; ")
    course = machine.home / rented.FOLDER
    lines = machine.asked.read_text().splitlines()
    steps = [step for part in gpu.parts(course / "evidence" / "a100") for step in part]
    assert sorted(set(lines)) == sorted(" ".join(step) for step in steps) and len(lines) == len(steps) + 1
    assert [line for line in set(lines) if lines.count(line) > 1] == before[-1:]
    told = [line for line in (first.stdout + second.stdout).splitlines() if line.startswith("part ")]
    assert [line[:11] for line in told] == [f"part {n} of 8" for n in (*range(1, 7), *range(1, 9))]
    assert all("at most 9 minutes at a time" in line for line in told) and "took 7 minutes on a card" in told[0]
    installs = machine.uv.read_text().splitlines()
    assert len(installs) == len(eras.known()) and all(" --no-deps " in line for line in installs)

    shutil.rmtree(course)  # what is sent is enough for the page
    with tarfile.open(packed) as whole:
        whole.extractall(machine.home, filter="data")
    ended = json.loads((machine.home / "a100" / "steps.json").read_text()).values()
    assert len(ended) == len(steps) and {step["part"] for step in ended} == {*range(1, 9)}
    assert {step["outcome"] for step in ended} == {"PASS", "NOT RUN"}
    rows = gpu.predictions.describe(machine.home / "a100")[2:]
    assert len(rows) > 5 and all("| held |" in row for row in rows)
    assert all(row in (machine.home / "a100" / "README.md").read_text() for row in rows)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("no CUDA", "torch 2.9.1 is a build for CPUs. Next: install a CUDA build"),
        ("small", "has 2.0 GiB, 1.0 of them free, and make gpu needs 8.0. Next: a larger card"),
    ],
)
def test_a_card_that_cannot_be_used_is_one_line_before_anything_is_installed(machine, archive, wrong, said):
    done = machine("--course", str(archive), STAND_IN_WRONG=wrong)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 3 and line.startswith("ERROR ") and said in line
    assert not machine.uv.exists() and not machine.asked.exists()


def test_a_broken_network_is_one_line_and_the_next_run_goes_on(machine, archive):
    done = machine("--course", str(archive), STAND_IN_OFFLINE="1")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 3 and "the package index was not reached" in line and "Next: run the same" in line
    machine.asked.with_name("cut").write_text("run 00")
    assert machine().returncode == -signal.SIGKILL and "run 00" in machine.asked.read_text()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "this file names no address of the course. Next: --course with an archive"),
        ("cut.tar.gz", "cut.tar.gz did not bring the course"),
        ("file:///nowhere/course.tar.gz", "did not bring the course"),
        ("other.tar.gz", "other.tar.gz holds no course. Next: --course with an archive of the whole repository"),
    ],
)
def test_a_course_that_does_not_come_is_one_line(machine, archive, tmp_path, monkeypatch, capsys, source, said):
    """Nothing half-unpacked stays in its place."""
    monkeypatch.chdir(tmp_path)
    for name in ("FAILURELAB_COURSE", "FAILURELAB_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rented, "COURSE", "")
    pathlib.Path("cut.tar.gz").write_bytes(archive.read_bytes()[:100_000])
    pathlib.Path("some").mkdir()
    shutil.make_archive("other", "gztar", tmp_path, "some")
    assert rented.main(["--course", source] if source else []) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ERROR ") and said in line and not pathlib.Path(rented.FOLDER).exists()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("python", "this is Python 3.10.1, and the locks are for 3.11 to 3.13. Next: run it with one of these"),
        ("torch", "has no torch. Next: run it with a Python that has one"),
        ("disk", "0.1 GB of disk are free at"),
        ("full", "No space left on device"),
    ],
)
def test_what_the_machine_lacks_is_one_line(tmp_path, monkeypatch, capsys, what, said):
    monkeypatch.chdir(tmp_path)
    if what == "python":
        monkeypatch.setattr(sys, "version_info", (3, 10, 1, "final", 0))
    elif what == "torch":
        monkeypatch.setattr(rented.importlib.util, "find_spec", lambda name: None if name == what else object())
        monkeypatch.setattr(rented.shutil, "which", lambda name: None)
    elif what == "disk":
        monkeypatch.setattr(rented.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 10**8}))
    else:
        monkeypatch.setattr(rented, "bring", full)
    status = rented.main(["--course", "course.tar.gz"])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == (1 if what == "full" else 3) and said in line and "Next: " in line
    assert list(tmp_path.iterdir()) == []


def full(course):
    raise OSError(28, "No space left on device")


def test_two_runs_at_once_are_refused(tmp_path):
    with rented.alone(tmp_path), pytest.raises(rented.CannotRun, match="another run works in"), rented.alone(tmp_path):
        pass


def test_uv_comes_into_the_course_s_folder_or_a_line_says_why_not(tmp_path, monkeypatch):
    asked, ended = [], subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(rented.subprocess, "run", lambda words, **_: asked.append(words) or ended)
    monkeypatch.setattr(rented.shutil, "which", lambda name: None)
    monkeypatch.setenv("PATH", "/usr/bin")
    rented.bring_uv(tmp_path)
    assert asked[0][-3:] == ["--target", str(tmp_path / ".course" / "uv"), "uv"]
    assert os.environ["PATH"] == f"/usr/bin{os.pathsep}{tmp_path / '.course' / 'uv' / 'bin'}"
    ended.returncode, ended.stderr = 1, "WARNING: retrying\nERROR: No matching distribution found for uv\n"
    with pytest.raises(rented.CannotRun, match=r"could not be fetched: ERROR: No matching.* Next: look at the network"):
        rented.bring_uv(tmp_path)
    monkeypatch.setattr(rented.shutil, "which", lambda name: name)
    rented.bring_uv(tmp_path)
    assert len(asked) == 2
