"""Scripts of a user's, which differ in what is given, and a session of preflight that runs several of them."""

import contextlib
import dataclasses
import os
import sys

from failurelab_course.experiments import models
from failurelab_preflight.finding import Change
from failurelab_preflight.session import Session

SCRIPT = """\
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

PATH = {path!r}
tokenizer = AutoTokenizer.from_pretrained(PATH, padding_side="left")
rows = [(a, b) for a in range(10) for b in range(10)]


def right(completions, answer, **_):
    return [float(text.strip() == each) for text, each in zip(completions, answer)]


{before}
trainer = {kind}(
    model={model},
    args=GRPOConfig("out", learning_rate=1e-5, gradient_checkpointing=False, num_generations=4, {config}),
    train_dataset=Dataset.from_list([{{"prompt": f"{{a}}+{{b}}=", "answer": str(a + b)}} for a, b in rows]),
    processing_class=tokenizer,
    reward_funcs={reward},
    {more}
)
{last}trainer.train()
"""
USUAL = {"kind": "GRPOTrainer", "reward": "right", "more": "", "last": ""}
USUAL["model"] = "AutoModelForCausalLM.from_pretrained(PATH)"
SIZES = "per_device_train_batch_size=8, max_completion_length=6, "


def script(before="", sizes=SIZES, config="", **given):
    """Return a script that trains the course's small model: lines before its trainer, and what is given to that."""
    return SCRIPT.format(path=str(models.path("tiny")), before=before, config=sizes + config, **USUAL | given)


def session_of(script, saved, python, variables, limit=600, processes=1):
    """Return a session of a script; what it saves goes to the new folder `saved`."""
    spec = {"script": str(script), "folder": str(script.parent), "module": "", "arguments": [], "steps": 3}
    spec |= {"real_model": False, "world_size": processes, "zero_stage": 0, "left_out": [], "visible": ""}
    saved.mkdir()
    return Session(saved, str(python), variables, spec, limit, lambda stage: None)


@contextlib.contextmanager
def scripts(folder, begin="", python=sys.executable, variables=None, processes=1, limit=600):
    """Inside, a function runs a text as FOLDER/train.py, with a change too, and returns what the run reports.

    Args:
        folder: of the script, and for what the session saves.
        begin: what all of the scripts begin with, whose imports are made once.
        python: to run them in.
        variables: of the environment.
        processes: of the launch.
        limit: seconds for all of them.
    """
    path = folder / "train.py"
    path.write_text(begin)
    session = session_of(path, folder / "session", python, variables or {}, limit, processes=processes)
    with session.open():

        def run(text, change=None):
            files = {os.path.realpath(path): begin + text}
            change = change or Change()
            return session.run(dataclasses.replace(change, files=files | change.files))

        yield run
