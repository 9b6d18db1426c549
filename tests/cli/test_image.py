"""From environment.yml to an image, and from the image to a class on Kubernetes: what can be held without either."""

import os
import re
import shutil
import subprocess
import sys

import yaml

from failurelab_course import eras

ROOT = eras.root()
VALUES = ROOT / "configs" / "hub" / "helm_values.yaml"
# Keys of the chart zero-to-jupyterhub 4.4 that the values use, as its values.schema.yaml names them. All of them were
# validated by hand against that schema; this holds later changes to what was.
CHART = {
    "hub": {"activeServerLimit", "concurrentSpawnLimit", "config"},
    "proxy": {"https"},
    "singleuser": {
        *("image", "cmd", "defaultUrl", "extraEnv", "storage", "startTimeout", "memory", "cpu", "networkPolicy"),
    },
    "prePuller": {"continuous"},
    "cull": {"enabled", "timeout"},
}


def test_the_chart_s_values():
    """Only keys that the chart knows; a pod is given what a seat takes, and the course is where the image has it."""
    values = yaml.safe_load(VALUES.read_text())
    assert set(values) <= set(CHART)
    for section, keys in values.items():
        assert set(keys) <= CHART[section], section
    seat = values["singleuser"]
    size = {name: float(value.removesuffix("G")) for name, value in seat["memory"].items()}
    assert size["guarantee"] <= size["limit"]
    home = "/home/jovyan"  # the chart mounts a learner's volume there
    assert seat["extraEnv"]["FAILURELAB_ROOT"] == f"{home}/failurelab"
    assert seat["defaultUrl"].startswith("/lab/tree/failurelab/notebooks/")
    assert (ROOT / "notebooks" / seat["defaultUrl"].rpartition("/")[2]).is_file()
    assert all(isinstance(value, str) for value in seat["extraEnv"].values()), "Kubernetes takes text only"
    assert "/srv/failurelab" in (ROOT / "docs" / "class_server.md").read_text()


def test_a_pod_makes_the_learner_s_copy_before_its_server(tmp_path):
    """A pod's command, run by bash: the copy is there when the server starts, and what the learner changed is kept."""
    command = yaml.safe_load(VALUES.read_text())["singleuser"]["cmd"]
    server = tmp_path / "bin" / "jupyterhub-singleuser"
    server.parent.mkdir()
    server.write_text('#!/bin/sh\nls "$HOME/failurelab"\necho server "$@"\n')
    server.chmod(0o755)
    for name in ("notebooks", "labs"):
        (tmp_path / "course" / name).mkdir(parents=True)
        (tmp_path / "course" / name / "file").write_text("as it comes")
    command = [word.replace("/srv/failurelab", str(tmp_path / "course")) for word in command]
    variables = {"HOME": str(tmp_path), "PATH": f"{server.parent}:/usr/bin:/bin"}
    for _ in range(2):
        done = subprocess.run([*command, "--port=8888"], env=variables, capture_output=True, text=True)
        words = done.stdout.split()
        assert {"helpers", "labs", "notebooks"} <= set(words) and words[-2:] == ["server", "--port=8888"], done.stderr
        (tmp_path / "failurelab" / "labs" / "file").write_text("mine")
    subprocess.run(command, env=variables, check=True, capture_output=True)
    assert (tmp_path / "failurelab" / "labs" / "file").read_text() == "mine"
    shutil.rmtree(tmp_path / "course")
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode and "server" not in done.stdout


def test_the_image_s_last_step():
    """repo2docker runs postBuild after environment.yml: bash can read it, and it makes the historic stacks."""
    path = ROOT / "postBuild"
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    commands = re.findall(r"^failurelab (.+)$", path.read_text(), re.MULTILINE)
    assert commands == ["eras create"]


def test_in_a_conda_environment_today_is_that_environment(tmp_path, monkeypatch):
    """A conda environment is no venv: sys.prefix equals sys.base_prefix there. Kernelspecs must not go into a .venv.

    It is the one that the course was installed into; another Python, a cluster's with torch, say, is left as it is.
    """
    for name in ("conda", "plain"):
        (tmp_path / name / "conda-meta").mkdir(parents=True)
    (tmp_path / "conda/lib/python3.11/site-packages/grpo_failurelab_course-0.1.0.dist-info").mkdir(parents=True)
    course = tmp_path / "course"
    for folder in ("eras", "helpers"):
        shutil.copytree(ROOT / folder, course / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("FAILURELAB_ROOT", str(course))
    for name, found in (("conda", tmp_path / "conda"), ("plain", course / ".venv")):
        monkeypatch.setattr(sys, "prefix", str(tmp_path / name))
        monkeypatch.setattr(sys, "base_prefix", str(tmp_path / name))
        assert eras.find(eras.TODAY, ready=False).folder == found
    (course / ".venv").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "conda"))
    assert eras.find(eras.TODAY, ready=False).folder == course / ".venv"
