"""One small training, as a person's script has it, which `failurelab preflight` judges in every release: see atlas.py.

What a release does not have ends it with the words NOT THERE.
"""

import argparse
import ast
import dataclasses
import json
import os
import pathlib
import sys

import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = os.environ["ATLAS_MODEL"]
CHECKPOINTING = {
    "off": {"gradient_checkpointing": False},
    "default": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "non-reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
SIZES = {
    "GRPO": {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8},
    "RLOO": {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8},
    "OnlineDPO": {"per_device_train_batch_size": 2, "max_new_tokens": 8},
}


def not_there(what):
    """End, for this release does not have it."""
    sys.exit(f"NOT THERE: {what}")


def value(text):
    """Return what a word of the command line stands for."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


parser = argparse.ArgumentParser()
parser.add_argument("--trainer", choices=sorted(SIZES), default="GRPO")
parser.add_argument("--model", default="plain")  # frozen, lora, wrapped, trained_adapter, name, bfloat16, bfloat16_lora
parser.add_argument("--checkpointing", choices=sorted(CHECKPOINTING), default="off")
parser.add_argument("--lengths", choices=("mixed", "long"), default="mixed")
parser.add_argument("--defaults", help="write what each configuration's fields are by default into this file, and end")
parser.add_argument("settings", nargs="*")
asked = parser.parse_args()

if asked.defaults:
    defaults = {}
    for name in SIZES:
        config = getattr(trl, f"{name}Config", None)
        for field in dataclasses.fields(config) if config else ():
            if isinstance(field.default, (bool, int, float, str, type(None))):
                defaults.setdefault(f"{name}Config", {})[field.name] = field.default
    pathlib.Path(asked.defaults).write_text(json.dumps(defaults))
    sys.exit()

config_class = getattr(trl, f"{asked.trainer}Config", None)
trainer_class = getattr(trl, f"{asked.trainer}Trainer", None)
if config_class is None or trainer_class is None:
    not_there(f"{asked.trainer}Trainer")
fields = {field.name for field in dataclasses.fields(config_class)}
settings = {name: value(text) for name, _, text in (word.partition("=") for word in asked.settings)}
for name in settings:
    if name not in fields:
        not_there(f"{name} in {config_class.__name__}")
sizes = SIZES[asked.trainer]
if asked.trainer == "RLOO" and "num_generations" not in fields:
    not_there("RLOOTrainer with reward functions")
usual = {
    "output_dir": "out",
    "learning_rate": 1e-5,
    "report_to": "none",
    "use_cpu": True,
    "max_steps": 3,
    "bf16": False,
}
args = config_class(**(usual | sizes | CHECKPOINTING[asked.checkpointing] | settings))

tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
if asked.model == "name":
    model = MODEL
else:
    dtype = torch.bfloat16 if "bfloat16" in asked.model else torch.float32
    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=dtype)
if asked.model == "frozen":
    model.get_input_embeddings().weight.requires_grad = False
if asked.model == "other_end":
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("0"), tokenizer.convert_tokens_to_ids("1")]
if asked.model == "wrapped":
    model = get_peft_model(model, LORA)
if asked.model == "trained_adapter":
    model = get_peft_model(model, LORA)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
more = {"peft_config": LORA} if asked.model in ("lora", "bfloat16_lora") else {}

pad = "Add these two numbers, please, and say nothing else than the sum. " * (12 if asked.lengths == "long" else 0)
pairs = [(a, b) for a in range(0, 20, 3) for b in range(0, 20, 2)]
rows = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"{pad}{a} + {b}"}], "answer": str(a + b)} for a, b in pairs]
)


def digits(completions, **kwargs):
    """Pay for digits, so that rewards differ."""
    return [sum(letter.isdigit() for letter in text[0]["content"]) / 8 for text in completions]


if asked.trainer == "OnlineDPO":

    class FewerLettersWin(trl.BasePairwiseJudge):
        """Prefer the shorter completion."""

        def judge(self, prompts, completions, shuffle_order=True):
            """Return 0 where the first is preferred, and 1 where the second is."""
            return [int(len(second) < len(first)) for first, second in completions]

    rows = rows.remove_columns("answer")
    more |= {"judge": FewerLettersWin()}
else:
    more |= {"reward_funcs": digits}
pathlib.Path("out").mkdir(exist_ok=True)
trainer = trainer_class(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **more)
trainer.train()
