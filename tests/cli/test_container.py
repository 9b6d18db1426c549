"""The image and the dev container, as far as they can be held without an engine: nothing here builds or runs one."""

import fnmatch
import json
import pathlib
import re
import shlex
import subprocess

import pytest
import tomllib

from failurelab_course import eras

ROOT = eras.root()
DOCKERFILE = ROOT / "Dockerfile"
DEVCONTAINER = ROOT / ".devcontainer" / "devcontainer.json"


def instructions():
    """Return the Dockerfile's instructions as (NAME, rest), continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def of(name):
    return [rest for kind, rest in instructions() if kind == name]


def ignored():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def left_out(path):
    """Whether .dockerignore leaves this path, or a folder above it, out of the build."""
    parts = pathlib.PurePosixPath(path).parts
    above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    # `**/` matches no folder too
    patterns = [each for line in ignored() for each in (line, line.removeprefix("**/"), line.replace("**/", "*/"))]
    return any(fnmatch.fnmatchcase(each, pattern) for each in above for pattern in patterns)


def test_stages_follow_one_another():
    """Each stage is built on an image or an earlier stage, and the Python is one that the locks are for."""
    stages, python = [], None
    for rest in of("FROM"):
        source, _, name = rest.split()
        if source not in stages:
            python = re.fullmatch(r"python:(3\.\d+)-slim-bookworm", source)[1]
        stages.append(name)
    assert stages == ["tools", "course"]
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", needs).groups()
    assert int(low) <= int(python.split(".")[1]) < int(high)


def test_what_is_copied_is_there_and_needed_files_are_not_left_out():
    """Every tracked file gets into the image; what git ignores, and what was made on this machine, does not."""
    for rest in of("COPY"):
        *sources, _target = [word for word in shlex.split(rest) if not word.startswith("--")]
        assert sources and all((ROOT / source).exists() for source in sources)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    tracked = tracked or [str(path.relative_to(ROOT)) for path in (ROOT / "helpers").rglob("*.py")]
    assert [path for path in tracked if left_out(path)] == []
    folders = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/")]
    assert [name for name in (*folders, ".git") if not left_out(name.replace("*", "some"))] == []
    assert left_out("helpers/failurelab/__pycache__/cli.pyc")
    assert left_out("labs/01_frozen_embeddings/train.py")


def test_nothing_runs_as_root_and_the_token_is_asked_for():
    assert of("USER")[-1] == "1000"
    (command,) = map(json.loads, of("CMD"))
    assert command[:2] == [".venv/bin/jupyter", "lab"] and "--no-browser" in command
    text = DOCKERFILE.read_text() + DEVCONTAINER.read_text()
    assert not re.search(r"token\s*=|password\s*=|disable_check_xsrf|allow-root|--privileged|sudo", text)
    # published on this machine alone
    assert re.findall(r"docker run .*-p (\S+)", text) == ["127.0.0.1:8888:8888"]
    assert of("EXPOSE") == ["8888"]


@pytest.mark.parametrize("text", [DOCKERFILE.read_text(), DEVCONTAINER.read_text()], ids=["image", "devcontainer"])
def test_make_targets_exist(text):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = re.findall(r"\bmake ([a-z]+)", text)
    assert asked and set(asked) <= set(targets)


def test_the_dev_container_is_the_image_s_tools():
    """VS Code mounts the clone, so its environments are made in there, where the GPU can be seen; not in the image."""
    found = json.loads(DEVCONTAINER.read_text())
    build = found["build"]
    assert (DEVCONTAINER.parent / build["dockerfile"]).resolve() == DOCKERFILE
    assert (DEVCONTAINER.parent / build["context"]).resolve() == ROOT
    assert build["target"] in [rest.split()[-1] for rest in of("FROM")]
    assert f" {found['remoteUser']} " in f" {' '.join(of('RUN'))} "
    assert found["hostRequirements"]["gpu"] == "optional"


def test_what_set_up_needs_is_installed():
    """Make and g++ of the README; git, which a dev container's editor wants."""
    assert {"g++", "git", "make"} <= set(" ".join(of("RUN")).split())
    assert any("make setup" in rest and "UV_CUDA_DRIVER_VERSION" in rest for rest in of("RUN"))
