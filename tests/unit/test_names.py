"""Names by release: the table agrees with what is installed, and errors that people paste are explained by it."""

import json
import pathlib
import subprocess

import pytest

from failurelab.failures import names, symptoms
from failurelab_preflight.diagnose import cli

TODAY = {"trl": "1.16.0", "transformers": "5.24.0"}
ROOT = pathlib.Path(__file__).resolve().parents[2]
STACKS = [ROOT / ".venv", ROOT / ".eras" / "trl-0.14"]  # the newest and the oldest
# What a stack has, in its own words: fields, parameters, methods, names that can be imported.
ASK = """
import dataclasses, importlib, inspect, json, sys
import transformers, trl
from trl import GRPOConfig, GRPOTrainer
from transformers import Trainer, TrainingArguments
answer = {"versions": {"trl": trl.__version__, "transformers": transformers.__version__}}
answer["fields"] = {c.__name__: [f.name for f in dataclasses.fields(c)] for c in (GRPOConfig, TrainingArguments)}
answer["parameters"] = {
    f"{c.__name__}.{m}": list(inspect.signature(getattr(c, m)).parameters)
    for c in (GRPOTrainer, Trainer) for m in ("__init__", "compute_loss", "_get_train_sampler", "log") if m in vars(c)}
answer["imports"] = {m.__name__: sorted({*dir(m)} & {*json.loads(sys.argv[1])[m.__name__]})
                     for m in (trl, transformers)}
print("ANSWER", json.dumps(answer), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_the_table_agrees_with_an_installed_stack(stack):
    """Each field, parameter and import that the table says is there is there, and none that it says is not."""
    if not (stack / "bin/python").exists():
        pytest.skip(f"{stack.name} is not set up")
    parts = {package: part["names"] for package, part in names.table().items()}
    listed = json.dumps({package: [*owners[package]] for package, owners in parts.items()})
    asked = subprocess.run([stack / "bin/python", "-W", "ignore", "-c", ASK, listed], capture_output=True, text=True)
    answer = json.loads(asked.stderr.partition("ANSWER ")[2].splitlines()[0])
    inherited = {"GRPOConfig": "TrainingArguments"}
    for kind in ("fields", "parameters", "imports"):
        for owner, there in answer[kind].items():
            package = next((package for package, owners in parts.items() if owner in owners), None)
            if package is None:  # its parameters have not changed
                continue
            version = answer["versions"][package]
            said = {name for name in parts[package][owner] if names.find(owner, name).there(version)}
            wrong = said - set(there) | {name for name in set(there) - said if name in parts[package][owner]}
            wrong = {name for name in wrong if "DDPO" not in name}  # which trl has where diffusers is installed
            base = inherited.get(owner)
            wrong -= {"tokenizer"} if owner == "Trainer.__init__" else set()  # a decorator takes it until 5.0
            wrong -= {name for name in wrong if base and name in parts["transformers"][base]}
            assert not wrong, (kind, owner, version)


def test_the_newest_releases_are_read():
    """The stack of today lies within the table, and each name ends where a release follows."""
    for package, version in TODAY.items():
        releases = names.table()[package]["releases"]
        assert version in releases
        for owner, entries in names.table()[package]["names"].items():
            for name in entries:
                assert all(first in releases for first, _ in names.find(owner, name).spans)


PASTED = [  # as it stands in public threads; the versions at hand; what must be said
    ("TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'", TODAY,
     "went with trl 0.28.0 (here: trl 1.16.0)", "filter your dataset"),
    ("TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'loss_type'", {"trl": "0.16.1"},
     "came with trl 0.17.0 (here: trl 0.16.1)", "Upgrade trl, or leave it out"),
    ("TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'num_generation'", TODAY,
     "No GRPOConfig of trl 0.14.0 to ", "`num_generations`"),
    ("ValueError: Some keys are not used by the HfArgumentParser: ['vllm_device']", {},
     "went with trl 0.18.0", "trl vllm-serve"),
    ("[rank0]: TypeError: Trainer.__init__() got an unexpected keyword argument 'processing_class'",  # MedicalGPT #444
     {"trl": "0.14.0", "transformers": "4.45.2"}, "came with transformers 4.46", "pip install -U transformers"),
    ("TypeError: GRPOTrainer._get_train_sampler() takes 1 positional argument but 2 were given", {},  # Tina #4
     "`dataset` of GRPOTrainer._get_train_sampler came with trl 0.18.0", "came with transformers 4.52"),
    ("ImportError: cannot import name 'OnlineDPOTrainer' from 'trl' (/usr/lib/trl/__init__.py)", TODAY,
     "went with trl 0.29.0", "from trl.experimental.online_dpo import OnlineDPOTrainer"),
    ("ImportError: cannot import name 'ConstantLengthDataset' from 'trl.trainer.utils'", {},  # OpenPipe ART #276
     "went with trl 0.20.0", ""),
    ("ImportError: cannot import name 'logprobs_from_logits' from 'trl.core'", TODAY, "`trl.core` went with", ""),
    ("ImportError: cannot import name 'GRPOConfig' from 'trl' (unknown location)", TODAY, "folder called trl", ""),
    ("ModuleNotFoundError: No module named 'trl.core'", TODAY, "went with trl 0.25.0", ""),
    ("AttributeError: 'GRPOTrainer' object has no attribute 'current_gradient_accumulation_steps'", {},  # TRL #3983
     "came with transformers 4.55.0", "eval_on_start"),
    ("The following `model_kwargs` are not used by the model: ['token_type_ids'] (note: typos in the generate "
     "arguments will also show up in this list)", TODAY, "model_input_names", ""),  # TRL #4549
    ("TypeError: reward_len() got an unexpected keyword argument 'completion_ids'", TODAY,  # TRL #4939
     "came with trl 0.18.0", "**kwargs"),
    ("TypeError: correctness_reward() missing 1 required positional argument: 'answer'", TODAY,
     "no column `answer`", "F14"),
    ("TypeError: GRPOTrainer.__init__() missing 1 required positional argument: 'reward_funcs'", TODAY,
     "GRPOTrainer needs `reward_funcs`", ""),
]  # fmt: skip


@pytest.mark.parametrize(("error", "installed", "release", "write"), PASTED, ids=[error[0][:60] for error in PASTED])
def test_what_people_paste_is_explained(error, installed, release, write):
    """In which release it came or went, and what to write; by `symptoms` too, with the number of the line."""
    told = names.explain(error, installed)
    assert release in told and write in told
    described = symptoms.describe(["Traceback (most recent call last):\n", error + "\n"])
    assert "line 2: " in described and names.explain(error) in described


@pytest.mark.parametrize(
    "error",
    [
        "AttributeError: 'NoneType' object has no attribute 'backward'",
        "TypeError: forward() got an unexpected keyword argument 'last_token_only'",
        "TypeError: f() missing 1 required positional argument: 'x'",
        "ImportError: cannot import name 'x' from 'peft'",
        "TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'",  # there in 0.27
    ],
)
def test_nothing_is_said_of_other_errors(error):
    assert names.explain(error, {"trl": "0.27.0"}) == ""
    assert names.explain(PASTED[0][0], {"trl": "main"}) == names.explain(PASTED[0][0])  # no version is left out


def test_a_run_that_ended_in_such_an_error_is_named(tmp_path, capsys):
    """By `diagnose`, with the releases that have the name."""
    (tmp_path / "train.log").write_text(f"Traceback\n{PASTED[0][0]}\n")
    assert cli.main([str(tmp_path)]) == 1
    assert "went with trl 0.28.0." in " ".join(capsys.readouterr().out.split())
