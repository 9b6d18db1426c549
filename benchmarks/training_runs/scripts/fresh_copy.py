"""GRPO on a copying task. Usage: python train.py [--learning_rate 3e-4 ...]"""

import argparse
import random

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="models/copier")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--per_device_train_batch_size", type=int, default=48)
    parser.add_argument("--num_generations", type=int, default=6)
    parser.add_argument("--max_completion_length", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--logging_steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args([])


def build_dataset():
    pick = random.Random(5)
    words = sorted({"".join(pick.choices("aeioknstr", k=4)) for _ in range(330)})
    return Dataset.from_list([{"prompt": f"copy: {word} ->", "target": word} for word in words])


def copy_reward(completions, target, **kwargs):
    scores = []
    for completion, word in zip(completions, target):
        scores.append(1.0 if completion == word else 0.0)
    return scores


def main():
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model)
    dataset = build_dataset()
    config = GRPOConfig(
        output_dir="copy-grpo",
        learning_rate=args.learning_rate,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=1,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        temperature=args.temperature,
        beta=args.beta,
        warmup_steps=2,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=args.logging_steps,
        log_completions=True,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=copy_reward,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main()
