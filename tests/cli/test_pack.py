"""An offline bundle: what it holds, and what its installer does and refuses. No network is used.

The whole way, with real wheels and the network cut, is `make pack-test`: it takes minutes and gigabytes.
"""

import os
import shutil
import subprocess
import sys

import pytest

from failurelab_course import eras
from failurelab_course.eras import install, offline

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
LINES = "small==5.0 deepspeed==0.1"


def git(top, *arguments):
    command = ["git", "-C", str(top), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    subprocess.run(command, check=True, env=os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null"})


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A committed course of two eras."""
    top = tmp_path / "course"
    (top / "eras").mkdir(parents=True)
    (top / "helpers" / "failurelab").mkdir(parents=True)
    shutil.copy(eras.root() / "eras" / "install_offline.sh", top / "eras")
    for name, text in {"torch.txt": "torch==2.13.0\n", "today.in": "", "today.txt": "", "old.in": ""}.items():
        (top / "eras" / name).write_text(text)
    (top / "eras" / "old.txt").write_text("small==6.0 ; python_full_version >= '3.11.5'\n")
    (top / "helpers" / "failurelab" / "__init__.py").write_text("")
    (top / "lesson.md").write_text("as committed\n")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "x")
    monkeypatch.setenv("FAILURELAB_ROOT", str(top))
    monkeypatch.setenv("PIP_FIND_LINKS", "/folder/of/torch")
    return top


@pytest.fixture
def steps(monkeypatch):
    """The commands of uv and pip, by a stand-in that puts an empty wheel of each line into the folder."""
    commands = []

    def step(command, what, subject, unresolved):
        commands.append(command)
        if "compile" in command:
            return f"{LINES} small==6.0\n" if command[-1].endswith("old.txt") else LINES
        option = "--dest" if "download" in command else "--wheel-dir"
        folder = command[command.index(option) + 1]
        for line in (word for word in command if "==" in word and not word.startswith("-")):
            open(f"{folder}/{line.replace('==', '-')}-py3-none-any.whl", "w").close()
        return ""

    monkeypatch.setattr(install, "step", step)
    return commands


def make(out, python=PYTHON, platform="manylinux_2_17_x86_64", names=(), torch_index=""):
    said = []
    offline.pack(out, offline.Target(python, platform), names, torch_index, said.append)
    return said


def test_a_bundle_holds_the_course_as_committed_and_each_wheel_once(course, steps, tmp_path):
    """What is not committed stays behind, and that is said; what an index holds as source alone is built."""
    (course / "lesson.md").write_text("being written\n")
    said = make(tmp_path / "bundle")
    assert (tmp_path / "bundle/course/lesson.md").read_text() == "as committed\n"
    assert "1 files have changes that are not committed (lesson.md first)" in said[0]
    names = sorted(path.name.partition("-py3")[0] for path in (tmp_path / "bundle/wheels").iterdir())
    assert names == ["deepspeed-0.1", "small-5.0", "small-6.0", "torch-2.13.0"]
    assert 'eras="today old"' in (tmp_path / "bundle/bundle.txt").read_text()
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path / "bundle", check=True)
    files = {str(path.relative_to(tmp_path / "bundle")) for path in (tmp_path / "bundle").rglob("*") if path.is_file()}
    listed = {line.partition("  ")[2] for line in (tmp_path / "bundle/SHA256SUMS").read_text().splitlines()}
    assert files == {*listed, "SHA256SUMS"}


def test_wheels_are_asked_for_by_python_and_platform(course, steps, tmp_path):
    """An older glibc's wheels serve too; torch comes from the folder or the index of CPU builds, never from another."""
    make(tmp_path / "bundle", "3.12", names=["old"])
    versions = {word for command in steps for word in command if word.startswith("--python-version")}
    assert versions == {"--python-version=3.12.0", "--python-version=3.12.99"}
    torch = next(command for command in steps if "torch==2.13.0" in command)
    assert "--no-index --find-links /folder/of/torch" in " ".join(torch)
    platforms = [word for word in torch if word.startswith(("manylinux", "linux"))]
    assert platforms[:2] == ["manylinux2014_x86_64", "manylinux_2_17_x86_64"] and platforms[-1] == "linux_x86_64"
    (built,) = (command for command in steps if "wheel" in command)
    assert built[-1] == "deepspeed==0.1"
    make(tmp_path / "other", torch_index="http://cpu.index/")
    assert "--index-url=http://cpu.index/" in next(command for command in reversed(steps) if "torch==2.13.0" in command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": "3.13"}, r"Python 3.13: bundles are for 3.11 and 3.12"),
        ({"platform": "macosx_14_0_arm64"}, "unknown platform 'macosx_14_0_arm64'"),
        ({"names": ["odl"]}, "unknown era 'odl': the eras are today, old"),
    ],
)
def test_what_cannot_be_packed_is_told(course, steps, tmp_path, options, message):
    with pytest.raises(eras.EraError, match=message):
        make(tmp_path / "bundle", **options)
    assert not steps


def test_where_nothing_can_be_packed(course, steps, tmp_path, monkeypatch):
    (tmp_path / "bundle").mkdir()
    with pytest.raises(eras.EraError, match=r"is there already: nothing is written. Next: another --out"):
        make(tmp_path / "bundle")
    with pytest.raises(eras.EraError, match=r"nowhere is no folder"):
        make(tmp_path / "nowhere/bundle")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(eras.EraError, match=r"no build of torch for CPUs is at hand. Next: --torch-index"):
        make(tmp_path / "new")
    shutil.rmtree(course / ".git")
    with pytest.raises(eras.EraError, match=r"git tells no files of .*Next: run this in a clone"):
        make(tmp_path / "new", torch_index="http://cpu.index/")
    assert not steps and not (tmp_path / "new").exists()


@pytest.fixture
def bundle(course, steps, tmp_path):
    make(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def run_installer(bundle, tmp_path):
    """Run install.sh with a stand-in for Python, which makes a .venv whose failurelab says its arguments."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || exec {sys.executable} "$@"\n'
        'echo "made: $@"; mkdir -p .venv/bin .eras/.cache; program=.venv/bin/failurelab\n'
        'printf "#!/bin/sh\\necho failurelab \\$@" > $program; chmod +x $program\n'
    )
    python.chmod(0o755)

    def run(folder, **variables):
        command = ["sh", str(bundle / "install.sh"), str(folder)]
        environment = os.environ | {"PYTHON": str(python)} | variables
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    return run


def test_an_install_makes_the_eras_and_keeps_your_work(bundle, run_installer, tmp_path):
    """From checksums to doctor; run again, it goes on and leaves a file that was changed."""
    done = run_installer("a/room")
    assert done.returncode == 0, done.stderr
    made = f"made: -m failurelab_course.eras create --wheels {bundle}/wheels today old"
    assert made in done.stdout and "failurelab doctor" in done.stdout and "Next: cd a/room" in done.stdout
    assert not (tmp_path / "a/room/.eras/.cache").exists()
    (tmp_path / "a/room/lesson.md").write_text("my notes\n")
    done = run_installer("a/room")
    assert done.returncode == 0 and "files that you changed are kept" in done.stdout
    assert (tmp_path / "a/room/lesson.md").read_text() == "my notes\n"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("printf x >> wheels/small-5.0-py3-none-any.whl", "small-5.0-py3-none-any.whl: FAILED"),
        ("rm wheels/small-5.0-py3-none-any.whl", "small-5.0-py3-none-any.whl: "),
        ("rm SHA256SUMS", "is not what was packed. Next: copy it here again"),
        (
            "sed -i s/^python=.*/python=3.10/ bundle.txt; sed -i /bundle.txt/d SHA256SUMS; "
            "sha256sum bundle.txt >> SHA256SUMS",
            "the bundle's wheels are for Python 3.10, and ",
        ),
        ("cp wheels/small-5.0-py3-none-any.whl wheels/small-5.0-1-py3-none-any.whl", "other files than were packed"),
        ("ln -s /etc/hostname course/notes", "other files than were packed"),
        ("mv bundle.txt ../kept; ln -s ../kept bundle.txt", "other files than were packed"),
        (
            "touch ../outside; sha256sum ../outside >> SHA256SUMS",
            "other files than were packed",
        ),
        ("mkdir ../room; touch ../room/thesis.txt", "does not hold this bundle's course: nothing in it is touched"),
    ],
)
def test_an_install_that_is_refused_changes_nothing(bundle, run_installer, tmp_path, spoil, message):
    subprocess.run(["sh", "-c", spoil], cwd=bundle, check=True)
    before = sorted(tmp_path.rglob("*"))
    done = run_installer("room")
    assert done.returncode == 1 and message in done.stderr and "Next: " in done.stderr.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_python_that_is_not_there_is_told(run_installer):
    done = run_installer("room", PYTHON="python3.99")
    assert done.returncode == 1 and "python3.99 is another, or none. Next: PYTHON=" in done.stderr
