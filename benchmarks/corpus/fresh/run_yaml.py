import sys
from pathlib import Path

import yaml
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def brevity(completions, **kwargs):
    return [1.0 / (1.0 + len(c[0]["content"])) for c in completions]


def contains_answer(completions, answer, **kwargs):
    return [1.0 if a in c[0]["content"] else -1.0 for c, a in zip(completions, answer)]


REWARDS = {"brevity": brevity, "answer": contains_answer}


def build(config_path):
    cfg = yaml.safe_load(Path(config_path).read_text())
    dataset = load_dataset("json", data_files=cfg["data"]["train"], split="train")
    peft_config = LoraConfig(**cfg["lora"]) if cfg.get("lora") else None
    return GRPOTrainer(
        model=cfg["model"],
        reward_funcs=[REWARDS[name] for name in cfg["rewards"]],
        args=GRPOConfig(**cfg["training"]),
        train_dataset=dataset,
        peft_config=peft_config,
    )


def main():
    trainer = build(sys.argv[1])
    model = trainer.model
    if hasattr(model, "print_trainable_parameters"):
        model.print_trainable_parameters()
    trainer.train()


if __name__ == "__main__":
    main()
