"""A bundle for a room without a network: what it holds, and what its installer does and refuses. No network is used.

The whole way, with real wheels and the network cut, is `make pack-test`: it takes minutes and gigabytes.
"""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from tests.files import write_program
from tools import pack

from failurelab_course import eras
from failurelab_course.eras import install

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
BASE = sys.executable
# uv reads a lock, pip puts an empty wheel of each line into the folder: every call is written down.
PROGRAM = """#!{python} -S
import os, sys
words = sys.argv[1:]
open(os.environ["CALLS"], "a").write(" ".join(words) + "\\n")
if "compile" in words:
    print("small==5.0 deepspeed==0.1", "small==6.0" if words[-1].endswith("old.txt") else "uv==1.0")
else:
    folder = words[words.index("--dest" if "download" in words else "--wheel-dir") + 1]
    os.makedirs(folder, exist_ok=True)
    for line in (word for word in words if "==" in word and not word.startswith("-")):
        open(f"{{folder}}/{{line.replace('==', '-')}}-py3-none-any.whl", "w").close()
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A committed course of two eras, and stand-ins for uv and for the Python that runs pip."""
    top = tmp_path / "course"
    for folder in ("eras", "tools", "helpers/failurelab"):
        (top / folder).mkdir(parents=True)
    shutil.copy(eras.root() / "tools" / "install_offline.sh", top / "tools")
    files = {"torch.txt": "torch==2.13.0\n", "today.in": "", "today.txt": "", "old.in": "", "old.txt": ""}
    for name, text in files.items():
        (top / "eras" / name).write_text(text)
    (top / "helpers" / "failurelab" / "__init__.py").write_text("")
    (top / "lesson.md").write_text("as committed\n")
    git = ["git", "-C", str(top), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True, env=os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null"})
    program = write_program(tmp_path / "program", PROGRAM.format(python=sys.executable))
    for name, value in (("FAILURELAB_ROOT", top), ("PIP_FIND_LINKS", "/torch"), ("CALLS", tmp_path / "calls")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(install, "uv", lambda: str(program))
    monkeypatch.chdir(tmp_path)
    return top


def make(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["pack.py", "bundle", *words])
    pack.main()


def test_a_bundle_holds_the_course_as_committed_and_each_wheel_once(course, tmp_path, monkeypatch, capsys):
    """An older glibc's wheels serve too; torch comes from the folder or an index of CPU builds, never from another."""
    (course / "lesson.md").write_text("being written\n")
    make(monkeypatch, "--python", "3.12", "--glibc", "17")
    assert (tmp_path / "bundle/course/lesson.md").read_text() == "as committed\n"
    assert "1 files have changes that are not committed (lesson.md first)" in capsys.readouterr().out
    names = sorted(path.name.partition("-py3")[0] for path in (tmp_path / "bundle/wheels").iterdir())
    assert names == ["deepspeed-0.1", "small-5.0", "small-6.0", "torch-2.13.0", "uv-1.0"]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path / "bundle", check=True)
    calls = (tmp_path / "calls").read_text()
    assert "--python-version=3.12.0 " in calls and "wheel --no-deps" in calls
    torch = calls.splitlines()[-1]
    assert "--no-index --find-links /torch torch==2.13.0" in torch
    assert "--platform=manylinux2014_x86_64 --platform=manylinux_2_17_x86_64 --platform=manylinux_2_16" in torch
    with pytest.raises(eras.EraError, match="is there already"):
        make(monkeypatch)
    monkeypatch.delenv("PIP_FIND_LINKS")
    shutil.rmtree(tmp_path / "bundle")
    with pytest.raises(eras.EraError, match="Next: --torch-index"):
        make(monkeypatch)
    make(monkeypatch, "--torch-index", "http://cpu.index/", "--eras", "old")
    assert "--index-url http://cpu.index/ torch==2.13.0" in (tmp_path / "calls").read_text().splitlines()[-1]


@pytest.fixture
def run_installer(course, tmp_path, monkeypatch):
    """Make a bundle; return a function that runs its installer with a stand-in for Python, which says its arguments."""
    make(monkeypatch, "--python", PYTHON)
    with zipfile.ZipFile(tmp_path / "bundle/wheels/uv-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("uv-1.0.data/scripts/uv", "")
    sums = "find . -type f ! -name SHA256SUMS | sed s,./,, | xargs sha256sum > ../sums; mv ../sums SHA256SUMS"
    subprocess.run(["sh", "-c", sums], cwd=tmp_path / "bundle", check=True)
    python = write_program(
        tmp_path / "python",
        f'#!/bin/sh\ncase "$2" in venv|zipfile) exec {BASE} "$@";; esac\n[ "$1" != -c ] || exec {BASE} "$@"\n'
        'echo "made: $@, $UV_OFFLINE $UV_FIND_LINKS"; program=.venv/bin/failurelab\n'
        'printf "#!/bin/sh\\necho failurelab \\$@" > $program; chmod +x $program\n',
    )

    def run(folder, python=python):
        command = ["sh", str(tmp_path / "bundle" / "install.sh"), str(folder)]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHON": str(python)})

    return run


def test_an_install_makes_the_eras_and_keeps_your_work(run_installer, tmp_path):
    done = run_installer("a/room")
    assert done.returncode == 0, done.stderr
    made = f"made: -m failurelab_course.eras create today old, 1 {tmp_path / 'bundle'}/wheels"
    assert made in done.stdout and "failurelab doctor" in done.stdout and "Next: cd a/room" in done.stdout
    assert os.access(tmp_path / "a/room/.venv/bin/uv", os.X_OK)
    (tmp_path / "a/room/lesson.md").write_text("my notes\n")
    done = run_installer("a/room")
    assert done.returncode == 0 and "files that you changed are kept" in done.stdout
    assert (tmp_path / "a/room/lesson.md").read_text() == "my notes\n"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("printf x >> wheels/small-5.0-py3-none-any.whl", "small-5.0-py3-none-any.whl: FAILED"),
        ("rm SHA256SUMS", "is not what was packed. Next: copy it here again"),
        ("cp wheels/small-5.0-py3-none-any.whl wheels/small-5.0-1-py3-none-any.whl", "other files than were packed"),
        ("touch ../outside; sha256sum ../outside >> SHA256SUMS", "other files than were packed"),
        ("mkdir ../room; touch ../room/thesis.txt", "does not hold this bundle's course: nothing in it is touched"),
    ],
)
def test_an_install_that_is_refused_changes_nothing(run_installer, tmp_path, spoil, message):
    subprocess.run(["sh", "-c", spoil], cwd=tmp_path / "bundle", check=True)
    before = sorted(tmp_path.rglob("*"))
    done = run_installer("room")
    assert done.returncode == 1 and message in done.stderr and "Next: " in done.stderr.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before
