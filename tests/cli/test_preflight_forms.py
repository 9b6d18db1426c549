"""Scripts as they come to `failurelab preflight`: a notebook, a module, `trl grpo`, two trainings, `from_config`.

Each is run whole, on the course's small model, in today's stack.
"""

import json
import sys
import textwrap

import pytest
from tests.cli.one_session import script

from failurelab_course.experiments import models
from failurelab_preflight import cli, launcher_line

pytestmark = pytest.mark.slow

ONE_THREAD = "import torch\nassert torch.get_num_threads() == 1\n"
SFT = """\
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained(PATH)
sft_trainer = SFTTrainer(
    model=model,
    args=SFTConfig("sft"),
    train_dataset=Dataset.from_dict({"text": ["1 + 1 = 2", "2 + 3 = 5"] * 8}),
    processing_class=tokenizer,
)
sft_trainer.train()
"""


def cells(*sources):
    return json.dumps({"cells": [{"cell_type": "code", "source": source} for source in sources], "nbformat": 4})


def notebook():
    first, then = script().split("\n\n\n", 1)
    return {"train.ipynb": cells("%pip install trl\n!nvidia-smi\n" + first, "%%bash\necho hello", "%%time\n" + then)}


def module():
    return {
        "package/__init__.py": "",
        "package/train.py": script(ONE_THREAD + "from .options import MORE\n", config="**MORE"),
        "package/options.py": "MORE = {'temperature': 1.0}\n",
    }


def by_trl():
    config = f"""\
        model_name_or_path: {models.path("tiny")}
        dataset_name: rows
        reward_funcs: [think_format_reward]
        output_dir: out
        per_device_train_batch_size: 8
        num_generations: 4
        """
    row = json.dumps({"prompt": [{"role": "user", "content": "1 + 1 ="}]})
    return {"grpo.yaml": textwrap.dedent(config), "rows/train.jsonl": f"{row}\n" * 8}


def one(*given, **more):
    return lambda: {"train.py": script(*given, **more)}


LARGE = "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(PATH, num_hidden_layers=48, hidden_size=1024))"
LATE = "raise ValueError('not that far')\n"
# What is asked, its files, what the answer says of the run (notes and cuts), and whether GRPO was judged
FORMS = {
    "a notebook": ("train.ipynb", notebook, ["cell 1: %pip install trl", "cell 2: %%bash"], True),
    "a module": ("python -m package.train", module, [], True),
    "by trl": ("trl grpo --config grpo.yaml --max_steps 100", by_trl, [], True),
    "two trainings": ("train.py", one(SFT, model="model"), ["SFTTrainer", "was not run"], True),
    "one is not reached": ("train.py", one(SFT + LATE), ["did not get to", "not that far"], False),
    "a configuration, vllm and wandb": (
        "train.py",
        one("from transformers import AutoConfig\n", model=LARGE, config="use_vllm=True, report_to='wandb'"),
        ["built small and random", "use_vllm: transformers generates", "report_to: nothing"],
        True,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_script_is_judged_in_the_form_that_it_has(form, tmp_path, monkeypatch):
    line, files, said, has_rewards = FORMS[form]
    for name, text in files().items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path.parent / "cache"))
    words = line.split()
    started = launcher_line.read_line(words)
    told = cli.ask(started, python=sys.executable, again=False)
    assert any(finding.failure == "F23" for finding in told.held), told  # it has trained
    assert (
        any(each.failure in ("F10", "F14") for each in told.findings if each not in told.not_applicable) == has_rewards
    ), told
    every = " | ".join([*told.notes, *told.cut])
    assert all(text in every for text in said), every
    assert not told.error or form == "one is not reached"
