"""GRPO on small arithmetic with <think>/<answer> tags, in the style of R1."""

import argparse
import re

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = "Reason inside <think></think>, then give the result inside <answer></answer>."
FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def to_chat(row):
    return {
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["prompt"]}],
        "answer": row["answer"],
    }


def format_reward(completions, **kwargs):
    return [0.5 if FORMAT.search(c[0]["content"]) else 0.0 for c in completions]


def correctness_reward(prompts, completions, answer, **kwargs):
    scores = []
    for completion, truth in zip(completions, answer):
        text = completion[0]["content"]
        m = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        guess = m.group(1).strip() if m else text.strip()
        scores.append(2.0 if guess == truth else 0.0)
    return scores


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model_name", default="Qwen/Qwen2-0.5B-Instruct")
    p.add_argument("--lora_r", type=int, default=0)
    p.add_argument("--gradient_checkpointing", action="store_true")
    p.add_argument("--max_completion_length", type=int, default=200)
    return p.parse_args()


if __name__ == "__main__":
    opt = parse_args()
    ds = load_dataset("json", data_files="data/sums.jsonl", split="train").map(to_chat)
    cfg = GRPOConfig(
        output_dir="outputs/reasoner", run_name="reasoner", learning_rate=1e-5, temperature=1.0, logging_steps=1,
        per_device_train_batch_size=8, num_generations=8, gradient_accumulation_steps=4,
        max_completion_length=opt.max_completion_length, gradient_checkpointing=opt.gradient_checkpointing,
        report_to="none",
    )  # fmt: skip
    lora = LoraConfig(r=opt.lora_r, lora_alpha=2 * opt.lora_r, task_type="CAUSAL_LM") if opt.lora_r else None
    trainer = GRPOTrainer(
        model=opt.model_name, reward_funcs=[format_reward, correctness_reward], args=cfg, train_dataset=ds,
        peft_config=lora,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(cfg.output_dir)
