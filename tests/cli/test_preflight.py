"""The whole command: one script of the corpus for each family, scripts that cannot be asked, and what is left after."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
from tests.cli.benchmark_scripts import load

from failurelab.preflight import command, launcher_line
from failurelab.preflight.report import answer
from failurelab_course import eras
from failurelab_course.experiments import models

pytestmark = pytest.mark.slow
CORPUS = load("preflight_corpus")
CASES = {case.name: case for case in CORPUS.read_corpus()}
ARCHIVED = ("first", "fresh", "hand", "threads")
ONE_OF_EACH = [
    "lora_hub_name_015",  # F2, F3a
    "frozen_022_default",  # F1
    "misaligned_and_temperature",  # F3b, F15
    "trl_grpo_015",  # F15, F3a, with a reward model
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
    result = CORPUS.judge(CASES[name], tries=False)
    assert CORPUS.right(CASES[name], result), result["text"]
    assert result["left_behind"] == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder with what the corpus' scripts read, where the command is run."""
    CORPUS.make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def failures_of(answers):
    return [answer["failure"] for answer in answers]


TWO_FILES = {
    "train.py": """\ufeff# -*- coding: utf-8 -*-
import argparse
import pathlib
from src import build

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
options = parser.parse_args()
assert pathlib.Path(__file__).name == "train.py"
trainer = build.make(options.model)
trainer.train()
""",
    "src/build.py": """from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def exact(completions, answer, **kwargs):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]


def make(model):
    config = GRPOConfig(
        "out",
        learning_rate=1e-4,
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_checkpointing=True,
        temperature=0.7,  # a little colder
    )
    rows = load_dataset("json", data_files="data/sums.jsonl", split="train")
    return GRPOTrainer(model, exact, config, train_dataset=rows, peft_config=LoraConfig(task_type="CAUSAL_LM"))
""",
}


def write_two_files(newline):
    for name, text in TWO_FILES.items():
        path = pathlib.Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.replace("\n", newline).encode())


def test_three_failures_behind_each_other_in_two_files(folder):
    """F2 ends the run, F3a and F15 are there too: named in turn. The patch of both files heals; CRLF and a BOM stay."""
    write_two_files("\r\n")
    before = {name: pathlib.Path(name).read_bytes() for name in TWO_FILES}
    words = ["--python", str(eras.find("trl-0.15").python), "--json", "answer.json", "--diff", "fix.diff"]
    words += ["train.py", "--model", "Qwen/Qwen2-0.5B"]
    assert command.main(words) == 1
    told = json.loads(pathlib.Path("answer.json").read_text())
    assert failures_of(told["findings"]) == ["F2", "F15", "F3a"] and not told["suspected"]
    assert all(finding["tried"] and finding["diff"] for finding in told["findings"])
    assert {name: pathlib.Path(name).read_bytes() for name in TWO_FILES} == before
    assert command.main(words) == 3  # fix.diff is there
    subprocess.run(["git", "apply", "fix.diff"], check=True)
    for name in TWO_FILES:
        contents = pathlib.Path(name).read_bytes()
        assert contents != before[name] and contents.count(b"\n") == contents.count(b"\r\n")
    assert pathlib.Path("train.py").read_bytes().startswith(b"\xef\xbb\xbf")
    words[words.index("fix.diff")] = "again.diff"
    assert command.main(words) == 0
    assert not pathlib.Path("again.diff").exists()


@pytest.mark.parametrize("stack", ["trl-0.15", "today"])
def test_a_fresh_process_answers_as_a_fork_does(stack, folder):
    """Runs are forked from a process that has the script's libraries: each answer is that of a process of its own."""
    script = launcher_line.Launch("first/lora_hub_name.py")
    answers = [
        command.ask(script, python=str(eras.find(stack).python), again=None, fork=fork) for fork in (True, False)
    ]
    forked, fresh = (answer.to_json(each) for each in answers)
    assert forked == fresh and bool(forked["findings"]) is (stack == "trl-0.15")


WRITES = """
import pathlib
count = pathlib.Path("count.txt")
runs = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(runs))
"""


def test_a_script_that_does_more_than_train_is_not_run_again(folder):
    """It counts its runs in a file of its own: it is run once, and again with --try alone."""
    script = pathlib.Path("first/lora_hub_name.py").read_text()
    pathlib.Path("train.py").write_text(WRITES + script)
    line, python = launcher_line.Launch("train.py"), str(eras.find("trl-0.15").python)
    told = command.ask(line, python=python, again=None)
    assert failures_of(told.suspected) == ["F2", "F3a"] and not told.findings
    assert "count.txt" in " ".join(told.notes) and pathlib.Path("count.txt").read_text() == "1"
    told = command.ask(line, python=python, again=True)
    assert failures_of(told.findings) == ["F2", "F3a"] and int(pathlib.Path("count.txt").read_text()) > 4
    told = command.ask(line, python=python, again=False)
    assert failures_of(told.suspected) == ["F2", "F3a"] and "--no-try" in told.suspected[0]["why"]


def test_a_script_that_does_not_do_the_same_twice(folder):
    """Checkpointing in its first run alone: what was seen is suspected, and the answer tells why."""
    script = pathlib.Path("first/lora_hub_name.py").read_text().replace("checkpointing=True", "checkpointing=runs == 1")
    pathlib.Path("train.py").write_text(WRITES + script)
    told = command.ask(launcher_line.Launch("train.py"), python=str(eras.find("trl-0.14").python), again=True)
    assert not told.findings and set(failures_of(told.suspected)) == {"F2", "F7"}
    assert any("did not do the same" in note for note in told.notes)


FROZEN = """
from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B")
model = PeftModel.from_pretrained(model, "adapters/sft"{trainable})
trainer = GRPOTrainer(
    model=model,
    args=GRPOConfig("out", beta={beta}, per_device_train_batch_size=8, num_generations=8),
    train_dataset=load_dataset("json", data_files="data/sums.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained("Qwen/Qwen2-0.5B"),
    reward_funcs=lambda completions, answer, **_: [float(c.strip() == a) for c, a in zip(completions, answer)],
)
trainer.train()
"""


@pytest.mark.parametrize(("beta", "stack"), [(0.04, "today"), (0.0, "today"), (0.04, "trl-0.15")])
def test_an_adapter_that_nothing_trains(beta, stack, tmp_path, monkeypatch):
    """Silent with a reference, an error without one; with is_trainable=True all of its tensors are in the optimizer."""
    CORPUS.make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    python = str(eras.find(stack).python)
    for trainable, found in (("", True), (", is_trainable=True", False)):
        pathlib.Path("train.py").write_text(FROZEN.format(trainable=trainable, beta=beta))
        told = command.ask(launcher_line.Launch("train.py"), python=python)
        assert ("F23" in failures_of(told.accusations)) is found, told
        assert found or "F23" in failures_of(told.held)


FOR_A_GPU = """
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

PATH = {path!r}


def reward(completions, **kwargs):
    return torch.tensor([float(len(set(text))) for text in completions], device="cuda").tolist()


model = AutoModelForCausalLM.from_pretrained(PATH, {load})
{then}
assert not torch.cuda.is_available()
trainer = GRPOTrainer(
    model=model,
    args=GRPOConfig("out", per_device_train_batch_size=8, num_generations=4, max_completion_length=16),
    train_dataset=Dataset.from_dict({{"prompt": ["1 + 1 = ", "2 + 3 ="] * 8}}),
    processing_class=AutoTokenizer.from_pretrained(PATH),
    reward_funcs=reward,
)
trainer.train()
"""
FORMS_FOR_A_GPU = [
    ("", 'model.to("cuda")', ["device cuda -> cpu"]),
    ('device_map="cuda"', "model.cuda()", ["device_map cuda -> cpu", "device cuda -> cpu"]),
    ('device_map="auto"', 'model.to(torch.device("cuda:0"))', ["device_map auto -> cpu", "device cuda:0 -> cpu"]),
    (
        'device_map={"": 0}, attn_implementation="flash_attention_2", torch_dtype=torch.bfloat16',
        "model.to(0)",
        ["device_map {'': 0} -> cpu", "attn_implementation flash_attention_2 -> sdpa", "device cuda:0 -> cpu"],
    ),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, nothing is mapped")
@pytest.mark.parametrize(("load", "then", "cut"), FORMS_FOR_A_GPU)
@pytest.mark.parametrize("stack", ["today", "trl-0.14"])
def test_a_script_for_a_gpu_is_judged_without_one(load, then, cut, stack, tmp_path, monkeypatch):
    """It ended in "Torch not compiled with CUDA enabled", or for want of flash_attn, with status 3."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("train.py").write_text(FOR_A_GPU.format(path=str(models.path("tiny")), load=load, then=then))
    arguments = ["--python", str(eras.find(stack).python), "--steps", "1", "--json", "answer.json", "train.py"]
    assert command.main(arguments) in (0, 1)
    told = json.loads(pathlib.Path("answer.json").read_text())
    assert set(cut) <= set(told["cut"])
    # What a reward function puts on a GPU is mapped in the process that asks it, and not told.
    assert {text for text in told["cut"] if text.endswith(("-> cpu", "-> sdpa"))} == set(cut)


def test_every_case_of_the_corpus_can_be_run():
    """Names are used once, scripts are there, and no case expects what no failure is called."""
    names = [case.name for case in CORPUS.read_corpus()]
    assert len(names) == len(set(names)) >= 50
    for case in CORPUS.read_corpus():
        kind, _, name = case.script.partition(":")
        there = (
            (CORPUS.HERE.parent / "notebooks" / f"{name}.ipynb").is_file()
            if kind == "notebook"
            else kind in ("trl", "examples") or case.script.partition("/")[0] in ARCHIVED
        )
        assert there and case.half in (*ARCHIVED, "trl", "course", "chains")


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
    told = command.ask(launcher_line.Launch("script.py"))
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
        lists = {"findings", "suspected", "held", "not_applicable", "not_checked", "cut"}
        assert set(told) == lists | {"script", "script_sha256", "versions"}
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
    told = command.ask(launcher_line.Launch("slow.py"), time_limit=1)
    assert "was ended after 1 seconds, while" in told.error and told.exit_status == 3
