"""Packaging: one list of the course's packages, and a take-home package that needs nothing else."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import tomllib

import failurelab
from failurelab import failures
from failurelab.failures import versions
from failurelab_course import eras

ROOT = eras.root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "helpers" / "failurelab"
PATHS = (path.relative_to(PACKAGE.parent).with_suffix("") for path in sorted(PACKAGE.rglob("*.py")))
MODULES = [".".join(path.parts).removesuffix(".__init__") for path in PATHS if path.stem != "__main__"]


def test_pyproject_and_the_era_today_name_the_same_packages():
    ours = {*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]}
    lines = (ROOT / "eras" / "today.in").read_text().splitlines()
    asked_for = {re.split(r"[=<>~]", line)[0] for line in lines if line and not line.startswith("#")}
    assert asked_for - {"setuptools", "wheel"} == ours - {"grpo-failurelab", "torch"}


@pytest.mark.parametrize(
    "command",
    [
        "lint-imports --no-cache",
        "deptry helpers/failurelab_course benchmarks tools",
        "deptry helpers/failurelab helpers/failurelab_preflight --config helpers/pyproject.toml",
        "python tools/rooms.py --check",
    ],
)
def test_the_contracts_of_imports_hold(command):
    """Rooms import only rooms below them, nothing goes in a circle, and what is imported is asked for.

    docs/architecture.md shows the rooms as the contracts have them, and speaks of what is there; no class name stands
    twice: `make rooms`.
    """
    command = [pathlib.Path(sys.executable).parent / command.split()[0], *command.split()[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_front_door_shows_what_there_is():
    """A line for each module that is public, which stands in both pages for users; each name in it is there."""
    lines = re.findall(r"^    (\w+)  +(.*(?:\n {16}.*)*)", failurelab.__doc__, re.MULTILINE)
    assert sorted(name for name, _ in lines) == failurelab.__all__
    pages = [(ROOT / page).read_text() for page in ("helpers/README.md", "docs/repairs.md")]
    for name, text in lines:
        paths = [ROOT / "helpers" / "failurelab" / path for path in (f"{name}.py", f"{name}/__init__.py")]
        code = "".join(path.read_text() for path in paths if path.is_file())
        shown = re.findall(r"\b(?:[a-z]\w*_\w+|\w+Guard)\b", text)
        assert [word for word in shown if not re.search(rf"\b{word}\b", code)] == []
        assert all(f"`{name}`" in page for page in pages), name


def test_the_version_stands_in_one_place():
    take_home = tomllib.loads((ROOT / "helpers" / "pyproject.toml").read_text())
    for project in (PROJECT, take_home):
        assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "failurelab.__version__"}
    assert f"version: {failurelab.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {failurelab.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "helpers" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_environment_yml_installs_the_lock_and_the_same_torch():
    text = (ROOT / "environment.yml").read_text()
    torch = re.search(r"torch==(\S+)", (ROOT / "eras" / "torch.txt").read_text()).group(1)
    assert f"pytorch-cpu={torch}" in text
    assert "-r eras/today.txt" in text
    assert "-e ./helpers\n" in text and "-e .\n" in text
    python = re.search(r"python=(\S+)", text).group(1)
    assert python in ("3.11", "3.12")
    # repo2docker runs postBuild after it, and by the name alone
    post_build = ROOT / "postBuild"
    assert os.access(post_build, os.X_OK) and subprocess.run(["bash", "-n", post_build]).returncode == 0
    assert re.findall(r"^failurelab (.+)$", post_build.read_text(), re.MULTILINE) == ["eras create"]


def test_an_empty_environment_is_told_what_it_lacks():
    """A wheel installed with --no-deps beside nothing: one line, and no traceback."""
    code = "import sys, importlib.metadata as m; real = m.entry_points; sys.modules['packaging'] = None; "
    code += "m.entry_points = lambda group, **more: [] if 'commands' in group else real(group=group, **more); "
    code += "from failurelab.__main__ import main; sys.exit(main(['preflight', 'train.py']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "has no packaging" in done.stderr


# What a take-home package has beside it, at the least: nothing of the course, and of the libraries these two.
ALONE = """
import importlib, importlib.metadata, sys
words = sys.argv[1:]
ours, theirs = "failurelab_course failurelab_preflight", "trl peft accelerate deepspeed bitsandbytes datasets"
sys.modules |= dict.fromkeys(f"{ours} {theirs} IPython jupyter_client matplotlib papermill psutil pydantic".split())
real = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **asked: () if "failurelab" in asked["group"] else real(**asked)
if words[0] == "import":
    sys.exit([importlib.import_module(name) for name in words[1:]] and 0)
from failurelab.__main__ import main
sys.exit(main(words))
"""
ELEMENT = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"


@pytest.mark.parametrize(
    ("words", "status", "said", "given"),
    [
        (["symptoms"], 0, "F2: ", ELEMENT),
        (["symptoms"], 1, "None of the known texts", "all is well"),
        (["doctor"], 0, "These versions have none", ""),
        (["lab", "list"], 2, "invalid choice", ""),
        (["preflight", "train.py"], 1, "is not installed", ""),
        (["import", *MODULES], 0, "", ""),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_the_take_home_package_works_alone(words, status, said, given):
    """Its modules are imported, its command answers, and what is not there is told without a traceback."""
    done = subprocess.run([sys.executable, "-c", ALONE, *words], capture_output=True, text=True, input=given)
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True), done
    assert "Traceback" not in done.stderr


def test_the_stack_that_doctor_recommends_is_the_courses():
    """The take-home package does not see eras/: what it says of a healthy stack is held to the lock here."""
    lock = (ROOT / "eras" / "torch.txt").read_text() + (ROOT / "eras" / "today.txt").read_text()
    stack = tomllib.loads((PACKAGE / "failures" / "healthy.toml").read_text())
    assert stack == {
        name: re.search(rf"^{name}==([^\s;]+)", lock, re.MULTILINE).group(1) for name in versions.LIBRARIES
    }
    assert not any(failures.affected(failure, stack) for failure in failures.all())
