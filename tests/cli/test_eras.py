"""Eras: made whole or not at all, found broken, and every refusal one line with a next step."""

import fcntl
import json
import os
import subprocess
import sys
import unittest.mock

import pytest
from tests.files import write_program

from failurelab_course import eras
from failurelab_course.eras import install

ROOT = eras.root()


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course's repository with one small era, without torch, whose environment is made by a stand-in for uv."""
    (tmp_path / "eras").mkdir()
    (tmp_path / "helpers" / "failurelab").mkdir(parents=True)
    (tmp_path / "eras" / "torch.txt").write_text("torch==2.13.0\n")
    (tmp_path / "eras" / "today.in").write_text("# title: today\n")
    (tmp_path / "eras" / "today.txt").write_text("six==1.17.0\n")
    (tmp_path / "eras" / "old.in").write_text("# title: old times\nsix==1.16.0\n")
    (tmp_path / "eras" / "old.txt").write_text("six==1.16.0\n")
    write_program(
        tmp_path / ".venv" / "bin" / "uv",
        "#!/bin/sh\n"
        'echo "$@" >> "$FAKE_UV_LOG"\n'
        'case "$1" in venv) shift; for last; do :; done; rm -rf "$last"\n'
        f'  mkdir -p "$last/bin" && ln -s {sys.executable} "$last/bin/python";;\n'
        'pip) case "$*" in *"$FAKE_UV_WAITS_AT"*) cat "$FAKE_UV_PIPE";; esac\n'
        '  case "$*" in *"$FAKE_UV_FAILS_AT"*) echo "$FAKE_UV_SAYS" >&2; exit 1;; esac;;\n'
        "esac\n",
    )
    monkeypatch.setenv("FAILURELAB_ROOT", str(tmp_path))
    monkeypatch.setenv("FAKE_UV_LOG", str(tmp_path / "uv.log"))
    monkeypatch.setenv("FAKE_UV_FAILS_AT", "nothing-fails")
    monkeypatch.setenv("FAKE_UV_WAITS_AT", "nothing-waits")
    monkeypatch.setenv("FAKE_UV_PIPE", str(tmp_path / "pipe"))
    monkeypatch.setenv("FAKE_UV_SAYS", "")
    return tmp_path


def test_an_era_is_made_once_and_its_kernel_is_offered(course):
    """A second set-up finds the era ready and calls no installer, so it needs no network; the first is told of no room.

    The lock holds no torch: it must be there first, or the newest with its CUDA libraries would come.
    """
    said = []
    with unittest.mock.patch.dict(install.ROOM, era=10**18), pytest.raises(eras.EraError, match="GB of disk are free"):
        install.create(["old"], say=str)
    assert not (course / "uv.log").exists()
    install.create(["old"], say=said.append)
    assert eras.find("old").status == "ready"
    spec = json.loads((course / ".venv/share/jupyter/kernels/failurelab-old/kernel.json").read_text())
    assert spec["display_name"] == "old times"
    assert spec["argv"][0] == str(course / ".eras/old/bin/python")
    assert spec["env"]["FAILURELAB_ERA"] == "old"
    calls = (course / "uv.log").read_text()
    first, second, *_ = [line for line in calls.splitlines() if " install " in line]
    assert first.endswith("torch==2.13.0") and second.endswith("old.txt")
    install.create(["old"], say=said.append)
    assert (course / "uv.log").read_text() == calls
    assert said[-1] == "era old: ready"


def test_deepspeed_is_told_of_gpus_that_it_can_build_for_and_see(course, monkeypatch):
    """Up to 0.16 its mere import fails for GPUs without a CUDA compiler."""
    write_program(course / "cuda" / "bin" / "nvcc", "")
    monkeypatch.setenv("CUDA_HOME", str(course / "cuda"))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(eras.os.path, "exists", lambda path: True)
    era = eras.find("old", ready=False)
    for hidden, told in ((None, "cuda"), ("0", "cuda"), ("", "cpu"), ("-1", "cpu")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if hidden is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert era.variables["DS_ACCELERATOR"] == told


def test_a_failed_set_up_leaves_nothing_half_made(course, monkeypatch):
    monkeypatch.setenv("FAKE_UV_FAILS_AT", "old.txt")
    monkeypatch.setenv("FAKE_UV_SAYS", "error: Failed to fetch: `six`\n  Caused by: dns error")
    with pytest.raises(eras.EraError, match=r"could not be fetched.*network.*Next:"):
        install.create(["old"], say=str)
    assert eras.find("old", ready=False).status == "missing"
    assert [path.name for path in (course / ".eras").iterdir()] == [".old.lock"]
    monkeypatch.setenv("FAKE_UV_FAILS_AT", "nothing-fails")
    assert install.create(["old"], say=str)[0].status == "ready"


@pytest.mark.parametrize(
    "damage", ["marker", "interpreter", "lock"], ids=["half-made", "interpreter gone", "made from another lock"]
)
def test_a_broken_era_is_found_and_made_again(course, damage):
    (era,) = install.create(["old"], say=str)
    if damage == "marker":
        (era.folder / eras.MARKER).unlink()
    elif damage == "interpreter":
        era.python.unlink()
    else:
        era.lock.write_text("six==1.15.0\n")
    assert era.status == ("stale" if damage == "lock" else "broken")
    with pytest.raises(eras.EraError, match="failurelab eras create old"):
        eras.find("old")
    said = []
    install.create(["old"], say=said.append)
    assert eras.find("old").status == "ready"
    assert "made again" in said[0]


def test_two_set_ups_at_once_wait_for_each_other(course):
    (course / ".eras").mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "helpers")}
    with open(course / ".eras" / ".old.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        other = subprocess.Popen(
            [sys.executable, "-m", "failurelab_course.eras", "create", "old"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert "waiting" in other.stdout.readline()
        assert not (course / ".eras" / "old").exists()
    assert other.wait(timeout=120) == 0
    era = eras.find("old")
    with open(era.setup_file, "a") as held:  # by a set-up of others too, which has made this one
        fcntl.flock(held, fcntl.LOCK_EX)
        assert era.status == "ready" and not era.is_being_made


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("× No solution found\n ╰─▶ Because there is no version of six==9", "Next: git checkout eras/old.txt"),
        # Where uv is told to be offline, the next step is to pack again, and not to change the lock.
        ("error: No solution found\n  Because plots was not found in the cache", "Next: make pack"),
        ("error: failed to write: No space left on device (os error 28)", "no space"),
        ("error: Failed to download `six`\n  Caused by: Hash mismatch for `six`", "came damaged"),
        ("something\nerror: it broke in a new way", "it broke in a new way. Next: "),
    ],
)
def test_an_installer_s_output_becomes_one_line(course, monkeypatch, output, expected):
    if "cache" in output:
        monkeypatch.setenv("UV_OFFLINE", "1")
    line = install.explain(output, "six", eras.find("old", ready=False))
    assert expected in line
    assert "\n" not in line


def more_eras(course):
    """Let the course's `today` be ready, and add an era and notebooks: the first needs `old`, the second `older`."""
    (course / "eras" / "older.in").write_text("# title: older times\nsix==1.15.0\n")
    (course / "eras" / "older.txt").write_text("six==1.15.0\n")
    (course / "eras" / "a_last.in").write_text("# title: needed by none\n")
    (course / "eras" / "a_last.txt").write_text("six==1.14.0\n")
    (course / "notebooks").mkdir()
    for name, needed in (("00_one", "today, old"), ("01_two", "older, today")):
        (course / "notebooks" / f"{name}.ipynb").write_text(f'["Library stacks: {needed}.*"]')
    (course / ".venv" / "bin" / "python").symlink_to(sys.executable)
    install.mark(eras.find("today", ready=False), course / ".venv")


def begin(code, *options):
    """Begin as `make lab` does, with a command that runs this code instead of JupyterLab."""
    code = f"from failurelab_course import eras\n{code}"
    return subprocess.run(
        [sys.executable, "-m", "failurelab_course.eras", "begin", *options, sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "helpers")},
        capture_output=True,
        text=True,
        timeout=300,
    )


def left(course):
    """Return what stands in .eras, without the locks."""
    return sorted(path.name for path in (course / ".eras").iterdir() if not path.name.endswith(".lock"))


def test_the_first_notebook_opens_while_the_other_eras_are_made(course, monkeypatch):
    more_eras(course)
    os.mkfifo(course / "pipe")
    monkeypatch.setenv("FAKE_UV_WAITS_AT", "older.txt")
    done = begin(
        "print([(era.name, era.status, era.is_being_made) for era in eras.known()])\n"
        "def say(line):\n    print('cell:', line)\n    if 'packages' in line: open('pipe', 'w').close()\n"
        f"import os; os.chdir({str(course)!r})\n"
        "print(eras.find('older', wait=say).status)\n"
        "eras.find('a_last', wait=str); raise SystemExit(7)"
    )
    assert done.returncode == 7, done.stderr
    lines = done.stdout.splitlines()
    assert "[('today', 'ready', False), ('a_last', 'missing', True), ('old', 'ready', False), ('older'" in done.stdout
    behind = next(line for line in lines if line.startswith("in the background: era older, a_last"))
    assert lines.index("era old: ready") < lines.index(behind) < lines.index("cell: era older: 1 packages")
    assert lines.index("cell: era older: 1 packages") < lines.index("ready")
    assert left(course) == ["a_last", "old", "older"]
    assert begin("print('again')").stdout.splitlines() == ["era today: ready", "era old: ready", "again"]


def test_a_set_up_in_the_background_ends_with_the_command_and_is_resumed(course, monkeypatch):
    """JupyterLab is left, with Ctrl-C for instance: nothing half-made stays, it is told, the next start goes on."""
    more_eras(course)
    os.mkfifo(course / "pipe")
    monkeypatch.setenv("FAKE_UV_WAITS_AT", "older.txt")
    with open(course / "pipe", "r+b", buffering=0):  # the installer reads from it, and comes to no end
        done = begin(
            "import os, signal\n"
            "def leave(line):\n    if 'packages' in line: os.kill(os.getppid(), signal.SIGINT); raise SystemExit\n"
            "eras.find('older', wait=leave)"
        )
    assert done.returncode == 0 and "set-up interrupted: what is done already is kept" in done.stderr
    assert left(course) == ["old"]
    for name in ("older", "a_last"):
        with pytest.raises(eras.EraError, match=rf"{name} is missing .*said: it was interrupted.*Next: "):
            eras.find(name, wait=str)
    monkeypatch.setenv("FAKE_UV_WAITS_AT", "nothing-waits")
    assert begin("raise SystemExit(1)", "--finish").returncode == 1
    assert left(course) == ["a_last", "old", "older"]


def test_a_set_up_that_fails_in_the_background_is_told_where_an_era_is_asked_for(course, monkeypatch):
    more_eras(course)
    monkeypatch.setenv("FAKE_UV_FAILS_AT", "older.txt")
    monkeypatch.setenv("FAKE_UV_SAYS", "error: No space left")
    told = "no space is left"
    done = begin(
        "for name in ('older', 'a_last'):\n"
        "    try: eras.find(name, wait=str)\n"
        "    except eras.EraError as error: print('cell:', error)"
    )
    assert done.returncode == 0 and "ERROR era older: " in done.stderr and told in done.stderr
    first, second = (line for line in done.stdout.splitlines() if line.startswith("cell:"))
    assert "era older is missing" in first and told in first and "era a_last is missing" in second and told in second
    assert left(course) == ["old"]


def test_in_a_conda_environment_today_is_that_environment(course, tmp_path, monkeypatch):
    """A conda environment is no venv: sys.prefix equals sys.base_prefix there. Kernelspecs must not go into a .venv.

    It is the one that the course was installed into; another Python, a cluster's with torch, say, is left as it is.
    """
    (tmp_path / "conda/lib/python3.11/site-packages/grpo_failurelab_course-0.1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "conda"))
    assert eras.find(eras.TODAY, ready=False).folder == course / ".venv"
    (course / ".venv").rename(tmp_path / "moved")
    assert eras.find(eras.TODAY, ready=False).folder == tmp_path / "conda"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "plain"))
    assert eras.find(eras.TODAY, ready=False).folder == course / ".venv"


@pytest.mark.parametrize("platform, runs", [("linux", True), ("darwin", False)])
def test_zero3_runs_where_a_lock_asks_for_deepspeed(course, monkeypatch, platform, runs):
    monkeypatch.setattr(sys, "platform", platform)
    era = eras.find("old", ready=False)
    assert not era.has_zero3
    era.lock.write_text("six==1.16.0\ndeepspeed==0.19.7 ; sys_platform == 'linux'\n")
    assert era.has_zero3 == runs


def test_remove_takes_environment_and_kernel(course):
    """After a removal, JupyterLab does not offer a kernel that cannot start. What runs the command is not deleted."""
    (era,) = install.create(["old"], say=str)
    install.remove("old", say=str)
    assert era.status == "missing"
    assert not (course / ".venv/share/jupyter/kernels/failurelab-old").exists()
    with pytest.raises(eras.EraError, match="make"):
        install.remove("today")


@pytest.mark.parametrize("lock", sorted((ROOT / "eras").glob("*.txt")), ids=lambda path: path.stem)
def test_locks_hold_released_packages_only(lock):
    """No local build, no path, no host, and no torch with its CUDA libraries: these come by torch's own step."""
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    names = [line.partition("==")[0] for line in lines]
    assert all("==" in line for line in lines)
    assert not [line for line in lines if "+" in line.partition(";")[0] or "/" in line or "@" in line]
    if lock.stem != "torch":
        assert not [name for name in names if name in ("torch", "triton") or name.startswith(("nvidia-cu", "cuda-"))]


@pytest.mark.parametrize("source", sorted((ROOT / "eras").glob("*.in")), ids=lambda path: path.stem)
def test_a_lock_holds_what_was_asked_for(source):
    """A pin changed in NAME.in and not compiled would be a promise that set-up does not keep."""
    locked = dict(line.split(" ")[0].split("==") for line in source.with_suffix(".txt").read_text().splitlines()[1:])
    for line in source.read_text().splitlines():
        name, pinned, version = line.partition(" ")[0].partition("==")
        if pinned:
            assert locked[name] == version
