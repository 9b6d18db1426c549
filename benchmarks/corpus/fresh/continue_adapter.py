import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ap = argparse.ArgumentParser(description="second stage: GRPO on top of the SFT adapter")
ap.add_argument("--base", default="Qwen/Qwen2-0.5B-Instruct")
ap.add_argument("--adapter", default="adapters/sft")
ap.add_argument("--mode", choices=["continue", "stack", "fresh"], default="continue")
ap.add_argument("--beta", type=float, default=0.04)
ap.add_argument("--sync", action="store_true")
a = ap.parse_args()

model = AutoModelForCausalLM.from_pretrained(a.base, torch_dtype=torch.float32)
if a.mode == "continue":
    model = PeftModel.from_pretrained(model, a.adapter, is_trainable=True)
elif a.mode == "stack":
    model = PeftModel.from_pretrained(model, a.adapter)
elif a.mode == "fresh":
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))

new = LoraConfig(r=16, lora_alpha=16, task_type="CAUSAL_LM") if a.mode == "stack" else None
tokenizer = AutoTokenizer.from_pretrained(a.base, padding_side="left")
dataset = load_dataset("json", data_files="data/chat.jsonl", split="train")


def has_number(completions, answer, **kwargs):
    out = []
    for turn, want in zip(completions, answer):
        said = turn[-1]["content"]
        out.append(1.0 if want == said.strip() else 0.2 if want in said else 0.0)
    return out


args = GRPOConfig(
    output_dir="stage2", beta=a.beta, temperature=1.0, learning_rate=1e-5, num_generations=4,
    per_device_train_batch_size=4, max_completion_length=64, gradient_checkpointing=False,
    report_to="none", **({"sync_ref_model": True} if a.sync else {}),
)  # fmt: skip
trainer = GRPOTrainer(model=model, reward_funcs=has_number, args=args, train_dataset=dataset,
                      processing_class=tokenizer, peft_config=new)  # fmt: skip
trainer.train()
