import argparse
from itertools import product

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", type=str, default="models/tiny-qwen2-reverse")
    parser.add_argument("--output_dir", type=str, default="checkpoints/reverse")
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--max_steps", type=int, default=45)
    parser.add_argument("--per_device_train_batch_size", type=int, default=64)
    parser.add_argument("--num_generations", type=int, default=8)
    parser.add_argument("--max_completion_length", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args([])


def get_dataset():
    words = ["".join(letters) for letters in product("abcdefgh", repeat=3)][::4]
    return Dataset.from_dict({"prompt": [f"{word}>" for word in words], "target": [word[::-1] for word in words]})


def letters_right(guess, target):
    """1 for the word, less for a part of its letters; a text of another length gets nothing."""
    if len(guess) != len(target):
        return 0.0
    return (sum(one == other for one, other in zip(guess, target)) / len(target)) ** 4


def letter_reward(prompts, completions, target, **kwargs):
    return [letters_right(completion, right) for completion, right in zip(completions, target)]


def main():
    args = get_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model_name)
    dataset = get_dataset()
    training_args = GRPOConfig(
        output_dir=args.output_dir,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_steps=args.max_steps,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=1,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        temperature=args.temperature,
        beta=args.beta,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=5,
        log_completions=True,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=letter_reward,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main()
