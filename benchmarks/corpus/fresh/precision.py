import argparse, logging

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

logging.basicConfig(level=logging.INFO)
log = logging.getLogger("train")


def get_model(path, dtype):
    kwargs = {} if dtype == "unset" else {"torch_dtype": getattr(torch, dtype)}
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    log.info("loaded %s as %s", path, next(model.parameters()).dtype)
    return model


def reward_close(completions, answer, **kwargs):
    """Nearer is better: 1 for the right number, falling with the distance."""
    rewards = []
    for c, a in zip(completions, answer):
        digits = "".join(ch for ch in c[0]["content"] if ch.isdigit())[:6]
        rewards.append(1 / (1 + abs(int(digits) - int(a))) if digits else 0.0)
    return rewards


def train(opts):
    set_seed(opts.seed)
    training = GRPOConfig(
        output_dir="precision", num_generations=4, per_device_train_batch_size=4, max_completion_length=64,
        bf16=opts.autocast, temperature=1.0, learning_rate=opts.lr, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=get_model(opts.model, opts.dtype),
        args=training,
        reward_funcs=[reward_close],
        train_dataset=load_dataset("json", data_files="data/chat.jsonl", split="train"),
        processing_class=AutoTokenizer.from_pretrained(opts.model, padding_side="left"),
    )
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2-0.5B-Instruct")
    parser.add_argument("--dtype", default="unset")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    train(parser.parse_args())
