"""The whole command: one script of the corpus for each family, scripts that cannot be asked, and what is left after."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from tests.cli.benchmark_scripts import load

from failurelab.preflight import command, launch
from failurelab_course import eras

pytestmark = pytest.mark.slow
CORPUS = load("preflight_corpus")
CASES = {case.name: case for case in CORPUS.read_corpus()}
ONE_OF_EACH = [
    "lora_hub_name_015",  # F2, F7, F3a
    "frozen_022_default",  # F1
    "misaligned_and_temperature",  # F3b, F15
    "adapter_again_014",  # F8
    "zero3_015",  # F4
    "qlora_current_device",  # F5
    "qlora_two_visible_014",  # F6
    "reward_wrong_sign",  # F14
    "batch_today",
    "lora_hub_name_today",  # nothing
]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_script_of_each_family_is_named(name):
    """As it is, in its own stack; the worst failure comes first, and nothing is left in its folder."""
    result = CORPUS.judge(CASES[name])
    assert all(CORPUS.right(CASES[name], result).values()), result["text"]
    assert result["left_behind"] == []


def test_a_repair_s_diff_heals(tmp_path, monkeypatch):
    """The diff applies to the script as it stands, and what was found is not found again."""
    CORPUS.make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    line, python = launch.Launch("first/adapter_again.py"), str(eras.find("trl-0.14").python)
    told = command.ask(line, python=python)
    (found,) = (found for found in told.findings if found["failure"] == "F8")
    applied = subprocess.run(["git", "apply", "-p0", "--unidiff-zero", "-"], input=found["repair"] + "\n", text=True)
    assert applied.returncode == 0
    told = command.ask(line, python=python)
    assert "F8" not in [found["failure"] for found in told.findings] and not told.error
    assert "F8" in [held["failure"] for held in told.held]


def test_every_case_of_the_corpus_can_be_run():
    """Names are used once, scripts are there, and no case expects what no failure is called."""
    names = [case.name for case in CORPUS.read_corpus()]
    assert len(names) == len(set(names)) >= 50
    for case in CORPUS.read_corpus():
        kind, _, name = case.script.partition(":")
        there = (
            (CORPUS.HERE.parent / "notebooks" / f"{name}.ipynb").is_file()
            if kind == "notebook"
            else kind in ("trl", "examples") or (CORPUS.CORPUS / case.script).is_file()
        )
        assert there and case.half in ("first", "fresh", "trl", "course")


OWN_ERRORS = {
    "wants an argument": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--model', required=True)\np.parse_args()\n",
        "wants other arguments",
    ),
    "asks": ("name = input('model? ')\n", "line 1, asks on its input"),
    "reads what is not there": ("text = 1\nopen('nowhere.json')\n", "line 2, reads nowhere.json, which is not there"),
    "lacks a package": ("import unsloth_of_nowhere\n", "needs unsloth_of_nowhere"),
    "ends": ("import sys\nsys.exit('no GPU here')\n", "ended by itself"),
    "never trains": ("print('only a loop of my own')\n", "ended without training"),
    "starts another": (
        "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py'])\n",
        "starts another process",
    ),
    "needs the hub": (
        "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained('nobody/nothing-9')\n",
        "needs the network",
    ),
    "raises": ("raise ValueError('of its own')\n", "line 1, ended in ValueError: of its own"),
}


@pytest.mark.parametrize("kind", OWN_ERRORS)
def test_a_script_that_cannot_be_asked_is_one_line(kind, tmp_path, monkeypatch):
    """Its own error, where it is, and the next step; status 3."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    script, text = OWN_ERRORS[kind]
    pathlib.Path("script.py").write_text(script)
    told = command.ask(launch.Launch("script.py"))
    assert text in told.error and "\n" not in told.error and told.exit_status == 3
    assert not told.findings and [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_answers_for_a_machine_and_the_exit_status(tmp_path):
    """A script that is not there, and one with a syntax error: JSON and JUnit XML are written all the same."""
    (tmp_path / "broken.py").write_text("a = (\n")
    for name, text in (("broken.py", "line 1: SyntaxError"), ("nowhere.py", "is not there")):
        words = ["--json", "out.json", "--junit", "out.xml", name, "--its", "own"]
        done = subprocess.run(
            [sys.executable, "-m", "failurelab.preflight", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 3 and text in done.stdout
        told = json.loads((tmp_path / "out.json").read_text())
        assert set(told) == {"findings", "held", "not_checked", "script", "versions"}
        assert "<error" in (tmp_path / "out.xml").read_text()


HANGS = """
import os, pathlib, subprocess, tempfile
child = subprocess.Popen(["sleep", "1000"])
with open(pathlib.Path(__file__).with_name("pipe"), "w") as pipe:
    pipe.write(f"{os.getpid()} {child.pid} {tempfile.gettempdir()}")
child.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_and_leaves_nothing(number, tmp_path, pipe, gone):
    """The script, and what it started; its temporary folder too."""
    (tmp_path / "hangs.py").write_text(HANGS)
    wait = pipe(tmp_path / "pipe")
    process = subprocess.Popen(
        [sys.executable, "-m", "failurelab", "preflight", "hangs.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    words = wait().split()
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 130 and "interrupted" in said
    assert gone(map(int, words[:2])) == [] and not os.path.exists(words[2])


def test_a_time_limit_ends_a_script_that_waits(tmp_path, monkeypatch):
    """The line says what it was doing."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("slow.py").write_text("import threading\nthreading.Event().wait()\n")
    told = command.ask(launch.Launch("slow.py"), time_limit=1)
    assert "was ended after 1 seconds, while" in told.error and told.exit_status == 3
