"""A policy gradient of our own on top of Trainer: sample, score, weigh."""

import os

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

NAME = "Qwen/Qwen2-0.5B"
NEW = 16
tokenizer = AutoTokenizer.from_pretrained(NAME, padding_side="left")


class ReinforceTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        prompts = {k: inputs[k] for k in ("input_ids", "attention_mask")}
        if os.environ.get("EVAL_MODE"):
            model.eval()
        with torch.no_grad():
            ids = model.generate(**prompts, max_new_tokens=NEW, do_sample=True, pad_token_id=tokenizer.pad_token_id)
        model.train()
        new = ids.shape[1] - prompts["input_ids"].shape[1]
        mask = (ids != tokenizer.pad_token_id).long()
        keep = {os.environ.get("KEEP", "logits_to_keep"): new + 1}
        logits = model(input_ids=ids, attention_mask=mask, **keep).logits[:, :new]
        logps = torch.stack([
            row.log_softmax(-1).gather(1, index[:, None])[:, 0] for row, index in zip(logits, ids[:, -new:])
        ])
        reward = torch.linspace(-1, 1, len(ids), device=ids.device)
        return -(reward[:, None] * logps).mean()


def collate(rows):
    return tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)


def main():
    model = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype=torch.float32)
    args = TrainingArguments(
        "out", per_device_train_batch_size=8, learning_rate=1e-5, remove_unused_columns=False,
        gradient_checkpointing=bool(os.environ.get("CHECKPOINTING")),
    )
    data = load_dataset("json", data_files="data/sums.jsonl", split="train")
    ReinforceTrainer(model, args, train_dataset=data, data_collator=collate).train()


main()
