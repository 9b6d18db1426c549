"""python checkpointing_yaml.py config.yaml"""

import sys

import yaml
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

with open(sys.argv[1]) as f:
    cfg = yaml.safe_load(f)


def reward_len(completions, **kwargs):
    return [-abs(cfg["target"] - len(completion)) for completion in completions]


model = AutoModelForCausalLM.from_pretrained(cfg["model"], torch_dtype="float32")
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward_len,
    args=GRPOConfig(**cfg["training"]),
    train_dataset=load_dataset("json", data_files=cfg["data"], split="train"),
)
trainer.train(resume_from_checkpoint=cfg.get("resume"))
