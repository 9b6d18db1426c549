"""One small training, as a person's script has it, which preflight judges in every release: see measure.py.

What a release does not have ends it with the words NOT THERE. What preflight does not judge is measured here: `--says`.
"""

import argparse
import ast
import copy
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import sys

import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = os.environ["ATLAS_MODEL"]
CHECKPOINTING = {
    "off": {"gradient_checkpointing": False},
    "default": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "non-reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
LENGTHS = {"mixed": 0, "longer": 2, "long": 12}  # sentences before the question, of 66 tokens each
WIDE = 32768  # entries of the vocabulary, where memory is measured
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
parser.add_argument("--model", default="plain")  # frozen, lora, wrapped, ..., as they stand below
parser.add_argument("--checkpointing", choices=sorted(CHECKPOINTING), default="off")
parser.add_argument("--lengths", choices=LENGTHS, default="mixed")
parser.add_argument("--prompts", choices=("messages", "text"), default="messages")
parser.add_argument("--measure", choices=("memory", "rollouts"), help="what is measured here, and written into --says")
parser.add_argument("--says", type=pathlib.Path, help="a file for what was measured here, a line of JSON each time")
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
fields = {field.name: field.default for field in dataclasses.fields(config_class)}
settings = {name: value(text) for name, _, text in (word.partition("=") for word in asked.settings)}
for name, given in settings.items():
    if name not in fields:
        not_there(f"{name} in {config_class.__name__}")
    if isinstance(fields[name], bool) and isinstance(given, str):  # a later release's, which this one takes for true
        not_there(f"{name}={given} in {config_class.__name__}")
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
    model = os.environ["ATLAS_BFLOAT16"]
else:
    dtype = torch.bfloat16 if "bfloat16" in asked.model else torch.float32
    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=dtype)
if asked.model == "frozen":
    model.get_input_embeddings().weight.requires_grad = False
if asked.model == "other_end":
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("0"), tokenizer.convert_tokens_to_ids("1")]
if asked.model == "wrapped":
    model = get_peft_model(model, LORA)


def train_adapter(model):
    """Stand for a supervised training of an adapter: it changes what the model says."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)


if asked.model == "trained_adapter":
    model = get_peft_model(model, LORA)
    train_adapter(model)
if asked.model in ("loaded_adapter", "loaded_twice", "merged_adapter"):
    trained = get_peft_model(copy.deepcopy(model), LORA)
    train_adapter(trained)
    trained.save_pretrained("adapter")
    model = PeftModel.from_pretrained(model, "adapter", is_trainable=asked.model == "loaded_twice")
if asked.model == "merged_adapter":
    model = model.merge_and_unload()
if asked.measure == "memory":  # as wide as the rows of a real model are, beside its layers
    model.resize_token_embeddings(WIDE)
more = {"peft_config": LORA} if asked.model in ("lora", "bfloat16_lora", "loaded_twice") else {}

pad = "Add these two numbers, please, and say nothing else than the sum. " * LENGTHS[asked.lengths]
pairs = [(a, b) for a in range(0, 20, 3) for b in range(0, 20, 2)]
asks = [f"{pad}{a} + {b}" for a, b in pairs]
prompts = asks if asked.prompts == "text" else [[{"role": "user", "content": text}] for text in asks]
rows = Dataset.from_list([{"prompt": prompt, "answer": str(a + b)} for prompt, (a, b) in zip(prompts, pairs)])


def digits(completions, **kwargs):
    """Pay for digits, so that rewards differ."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(letter.isdigit() for letter in text) / 8 for text in texts]


def say(**figures):
    """Write down what was measured."""
    with asked.says.open("a") as file:
        file.write(json.dumps(figures) + "\n")


def note_memory(model):
    """Have the run end at the model's first training pass, of which the peak of memory is noted."""
    from failurelab_course.experiments.memory import peak_memory

    forward = model.forward

    @functools.wraps(forward)
    def measured(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        peak = peak_memory(lambda: forward(*args, **kwargs))
        rows, tokens = (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape
        say(peak=peak, vocabulary=WIDE, rows=rows, tokens=tokens)
        sys.exit("measured")

    model.forward = measured


def stale_rollouts(model):
    """Return a rollout function that generates with its own copy of the model, as an engine does: nobody updates it."""
    from failurelab.logits import completion_logps

    engine = copy.deepcopy(model).eval()

    @torch.no_grad()
    def rollout(prompts, *_):
        answer = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        gaps = []
        for prompt in prompts:
            text = prompt
            if not isinstance(prompt, str):
                text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            whole = engine.generate(ids, max_new_tokens=8, do_sample=True, pad_token_id=tokenizer.pad_token_id)
            kept = whole.shape[1] - ids.shape[1]
            scores = [completion_logps(each, whole, torch.ones_like(whole), kept)[0] for each in (engine, policy())]
            gaps.append((scores[0] - scores[1]).abs().mean().item())
            answer["prompt_ids"].append(ids[0].tolist())
            answer["completion_ids"].append(whole[0, ids.shape[1] :].tolist())
            answer["logprobs"].append(scores[0].tolist())
        say(gap=sum(gaps) / len(gaps))
        return answer

    return rollout


def policy():
    """Return the model that is trained."""
    return trainer.accelerator.unwrap_model(trainer.model)


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
if asked.measure == "rollouts":
    if "rollout_func" not in inspect.signature(trainer_class.__init__).parameters:
        not_there("rollout_func in GRPOTrainer")
    more |= {"rollout_func": stale_rollouts(model)}
pathlib.Path("out").mkdir(exist_ok=True)
trainer = trainer_class(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **more)
if asked.measure == "memory":
    note_memory(policy())
trainer.train()
