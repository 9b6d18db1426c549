"""The whole command: one script of the corpus for each family, scripts that cannot be asked, and what is left after."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
from tests.cli import one_session
from tests.cli.benchmark_scripts import load

from failurelab_course import eras
from failurelab_preflight import cli, launcher_line
from failurelab_preflight.answer import Answer

pytestmark = pytest.mark.slow
CORPUS = load("preflight_corpus")
CASES = {case.name: case for case in CORPUS.read_corpus()}
ONE_OF_EACH = [
    "misaligned_and_temperature",  # F3b, and F15 noted
    "trl_grpo_015",  # none: F15 is noted, with a reward model and the script that trl itself has
    "qlora_current_device",  # F5
]


@pytest.fixture(autouse=True, scope="module")
def few_words():
    """Give Qwen2-0.5B a vocabulary that holds its tokenizer's: most of a run's time is 151,936 columns of logits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CORPUS.QWEN, "vocab_size", 4096)
        yield


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
    return [each["failure"] if isinstance(each, dict) else each.failure for each in answers]


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


def test_a_failure_in_two_files_and_what_its_release_does(folder):
    """F2 ends the run; F15, which the release does to everybody, is noted. The patch heals; CRLF and a BOM stay."""
    before = {name: text.replace("\n", "\r\n").encode() for name, text in TWO_FILES.items()}
    pathlib.Path("src").mkdir()
    for name, contents in before.items():
        pathlib.Path(name).write_bytes(contents)
    words = ["--python", str(eras.find("trl-0.15").python), "--json", "answer.json", "--all", "--diff", "fix.diff"]
    words += ["train.py", "--model", "Qwen/Qwen2-0.5B"]
    assert cli.main(words) == 1
    told = json.loads(pathlib.Path("answer.json").read_text())
    assert failures_of(told["findings"]) == ["F2"] and not told["suspected"]
    assert failures_of(told["noted"]) == ["F3a", "F15"]
    assert all(finding["tried"] and finding["diff"] for finding in told["findings"])
    assert {name: pathlib.Path(name).read_bytes() for name in TWO_FILES} == before
    assert cli.main(words) == 2  # fix.diff is there
    subprocess.run(["git", "apply", "fix.diff"], check=True)
    for name in TWO_FILES:
        contents = pathlib.Path(name).read_bytes()
        assert contents.count(b"\n") == contents.count(b"\r\n")
    assert pathlib.Path("train.py").read_bytes() != before["train.py"]
    assert pathlib.Path("train.py").read_bytes().startswith(b"\xef\xbb\xbf")
    words[words.index("fix.diff")] = "again.diff"
    assert cli.main(words) == 0
    assert not pathlib.Path("again.diff").exists()


WRITES = """
import pathlib
count = pathlib.Path("count.txt")
runs = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(runs))
"""


def test_a_script_that_does_more_than_train_is_run_again_with_try_alone(folder):
    """It counts its runs in a file of its own, and checkpoints in its first run: what was seen there is suspected."""
    script = pathlib.Path("first/lora_hub_name.py").read_text().replace("checkpointing=True", "checkpointing=runs == 1")
    pathlib.Path("train.py").write_text(WRITES + script)
    line, python = launcher_line.Launch("train.py"), str(eras.find("trl-0.14").python)
    told = cli.ask(line, python=python)
    assert set(failures_of(told.suspected)) == {"F2", "F7"} and not told.named
    assert "count.txt" in " ".join(told.notes) and pathlib.Path("count.txt").read_text() == "1"
    pathlib.Path("count.txt").unlink()
    told = cli.ask(line, python=python, again=True)
    assert set(failures_of(told.suspected)) == {"F2", "F7"} and not told.named
    assert any("did not do the same" in note for note in told.notes) and int(pathlib.Path("count.txt").read_text()) > 1


def test_processes_of_the_run_are_no_effects(tmp_path, own_processes):
    """They were told as the script's: it "connects to" its own processes. Nothing was tried."""
    mapped = "Dataset.from_list([{'a': 1}] * 16).map(dict, num_proc=2)\n"
    never_right = "lambda completions, **_: [0.0] * len(completions)"
    (tmp_path / "train.py").write_text(one_session.script(mapped, reward=never_right))
    line = f"{sys.executable} -m failurelab preflight train.py > answer.txt 2>&1"
    subprocess.run(["sh", "-c", line], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    answer = (tmp_path / "answer.txt").read_text()
    assert "1 suspected (F10)" in answer and "--try" not in answer


FROZEN = """\
from peft import PeftModel

model = AutoModelForCausalLM.from_pretrained(PATH)
model = PeftModel.from_pretrained(model, "adapters/sft")
"""


def test_an_adapter_that_nothing_trains(folder):
    """With is_trainable=True all of its tensors are in the optimizer."""
    pathlib.Path("train.py").write_text(one_session.script(FROZEN, model="model"))
    told = cli.ask(launcher_line.Launch("train.py"))
    (found,) = (finding for finding in told.named if finding.failure == "F23")
    assert '+model = PeftModel.from_pretrained(model, "adapters/sft", is_trainable=True)' in found.diff
    assert found.tried == "the optimizer holds 8 of 8 tensors of the adapters"
    assert "F23" not in failures_of(told.suspected)


FOR_A_GPU = """\
import torch


def reward(completions, **kwargs):
    return torch.tensor([float(len(set(text))) for text in completions], device="cuda").tolist()


{models}
assert not torch.cuda.is_available()
"""
FORMS_FOR_A_GPU = [
    ('device_map="auto"', 'model.to(torch.device("cuda:0"))', {"device_map auto -> cpu", "device cuda:0 -> cpu"}),
    (
        'device_map={"": 0}, attn_implementation="flash_attention_2", torch_dtype=torch.bfloat16',
        "model.cuda()",
        {"device_map {'': 0} -> cpu", "attn_implementation flash_attention_2 -> sdpa", "device cuda -> cpu"},
    ),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, nothing is mapped")
def test_a_script_for_a_gpu_is_judged_without_one(tmp_path, monkeypatch):
    """It ended in "Torch not compiled with CUDA enabled", or for want of flash_attn, with status 3."""
    monkeypatch.chdir(tmp_path)
    forms = FORMS_FOR_A_GPU
    loads = [f"model = AutoModelForCausalLM.from_pretrained(PATH, {load})\n{then}" for load, then, _ in forms]
    before = FOR_A_GPU.format(models="\n".join(loads))
    pathlib.Path("train.py").write_text(one_session.script(before, model="model", reward="reward"))
    told = cli.ask(launcher_line.Launch("train.py"), steps=1, again=False)
    assert not told.error and told.exit_status in (0, 1)
    # What a reward function puts on a GPU is mapped in the process that asks it, and not told.
    cut = {text for text in told.cut if text.endswith(("-> cpu", "-> sdpa"))}
    assert cut == set().union(*(each for _, _, each in forms))


@pytest.mark.parametrize(
    ("words", "text", "own"),
    [
        (["train.py", "a", "--json=answer.json", "--all", "b"], "", ["a", "b"]),
        (["train.py", "--json", "a"], "parser.add_argument('--json')", ["--json", "a"]),
        (["train.py", "--diff", "a"], "", ["--diff", "a"]),  # every other option is the script's
        (["--", "train.py", "--json", "a"], "", ["--json", "a"]),
        (["train.py", "--edit", "a", "--steps", "7"], "class Own:\n    edit : str", ["--edit", "a", "--steps", "7"]),
    ],
)
def test_an_option_behind_the_script_is_preflight_s_where_the_script_does_not_know_it(
    words, text, own, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("train.py").write_text(text)
    monkeypatch.setattr(cli, "ask", lambda line, **options: Answer(line.script, {}, error=str([*line.arguments])))
    assert cli.main(words) == 3
    assert str(own) in capsys.readouterr().out
    assert pathlib.Path("answer.json").is_file() is ("b" in own)


OWN_ERRORS = {
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--model', required=True)\np.parse_args()\n": (
        "line 4, wants other arguments",
        "the following arguments are required: --model",
    ),
    "name = input('model? ')\n": ("line 1, asks on its input",),
    "text = 1\nopen('nowhere.json')\n": ("line 2, reads nowhere.json, which is not there",),
    "import wandb_of_nowhere as wandb\nwandb.init()\n": ("line 1, needs wandb_of_nowhere",),
    "import sys\nsys.exit('set HF_TOKEN first')\n": ("ended by itself", "set HF_TOKEN first"),
    "print('only a loop of my own')\n": ("ended without training",),
    "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py'])\n": ("starts another process",),
    "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained('nobody/nothing-9')\n": (
        "line 2, needs the network",
    ),
    "import torch\nassert torch.cuda.device_count() > 0, 'a GPU, please'\n": ("asked for a GPU", "a GPU, please"),
    "import torch\nif not torch.cuda.is_available():\n    raise SystemExit('no GPU')\n": ("line 3", "asked for a GPU"),
    "from huggingface_hub import login, notebook_login\nlogin()\nnotebook_login()\n": ("ended without training",),
    "raise ValueError('of its own')\n": ("line 1, ended in ValueError: of its own",),
}


def test_a_script_that_cannot_be_asked_is_one_line(tmp_path, monkeypatch):
    """Its own error, where it is, in its own words, and the next step."""
    monkeypatch.chdir(tmp_path)
    with one_session.scripts(tmp_path, variables={"HF_HUB_OFFLINE": "1"}) as run:
        errors = {text: run(text).error for text in OWN_ERRORS}
    for text, said in OWN_ERRORS.items():
        assert all(each in errors[text] for each in said), errors[text]
        assert "\n" not in errors[text] and "SystemExit" not in errors[text]


KEYS = """
    findings noted suspected held not_applicable not_checked failures figures in_force schema failurelab seed measured
    compared error script_sha256 versions
"""


def test_answers_for_a_machine_and_the_exit_status(tmp_path, monkeypatch, capsys):
    """What is not there, and a syntax error: JSON is written all the same, and the process ends with that status."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("broken.py").write_text("a = (\n")
    pathlib.Path("torn.ipynb").write_text("[]")
    lines = {"broken.py": "line 1: SyntaxError", "nowhere.py": "is not there", "-m nowhere": "no module nowhere"}
    lines["torn.ipynb"] = "torn.ipynb: SyntaxError"  # no line of it is to blame
    for line, text in lines.items():
        assert cli.main(words := ["--json", "out.json", *line.split(), "--its", "own"]) == 3
        assert text in " ".join(capsys.readouterr().out.split())
        told = json.loads(pathlib.Path("out.json").read_text())
        assert set(told) == set(KEYS.split()) and told["error"] is True
        pathlib.Path("out.json").unlink()
        if line == "nowhere.py":
            assert subprocess.run([sys.executable, "-m", "failurelab_preflight", *words]).returncode == 3
            assert json.loads(pathlib.Path("out.json").read_text()) == told


def test_a_python_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("train.py").touch()
    assert cli.main(["--python", "no/such/python", "train.py"]) == 3
    assert "no/such/python" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--diff", "--json"])
@pytest.mark.parametrize("name", ["nowhere/out", "folder", "train.py/out", "/proc/out"])
def test_a_file_that_cannot_be_written_is_told_before_the_run(option, name, tmp_path, monkeypatch, capsys):
    """It was a traceback after the whole run, with the status that means "found"."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("folder").mkdir()
    pathlib.Path("train.py").touch()
    monkeypatch.setattr(cli, "ask", lambda *_, **__: pytest.fail("the script was run"))
    assert cli.main([option, name, "train.py"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and name in told and option in told
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "train.py"]


def test_a_folder_that_goes_while_the_script_runs(tmp_path, monkeypatch, capsys):
    """The answer is printed, the file is not written, and nothing says that something was found."""
    monkeypatch.chdir(tmp_path)
    folder = pathlib.Path("folder")
    folder.mkdir()
    monkeypatch.setattr(cli, "ask", lambda *_, **__: folder.rmdir() or Answer("train.py", {}))
    assert cli.main(["--json", "folder/out.json", "train.py"]) == 3
    said = capsys.readouterr()
    assert "train.py" in said.out and said.err.count("\n") == 1 and "folder/out.json" in said.err


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
    told = cli.ask(launcher_line.Launch("slow.py"), time_limit=1)
    assert "was ended after 1 seconds, while" in told.error and told.exit_status == 3
