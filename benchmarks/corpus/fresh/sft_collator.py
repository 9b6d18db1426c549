"""Supervised warm start with a collator of our own."""

import os

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

MODEL = "Qwen/Qwen2-0.5B"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
if os.environ.get("PAD") == "eos":
    tokenizer.pad_token = tokenizer.eos_token


class Collate:
    def __init__(self, tok):
        self.tok = tok

    def __call__(self, rows):
        ids = [torch.tensor(r["input_ids"]) for r in rows]
        width = max(len(i) for i in ids)
        batch = torch.full((len(ids), width), self.tok.pad_token_id)
        mask = torch.zeros_like(batch)
        for k, i in enumerate(ids):
            batch[k, : len(i)] = i
            mask[k, : len(i)] = 1
        labels = batch.clone()
        labels[labels == self.tok.pad_token_id] = -100
        return {"input_ids": batch, "attention_mask": mask, "labels": labels}


def encode(row):
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    return {"input_ids": tokenizer(text.rstrip("\n"))["input_ids"]}


data = load_dataset("json", data_files="data/sft.jsonl", split="train")
data = data.map(encode, remove_columns=data.column_names)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.float32),
    args=SFTConfig(output_dir="sft", learning_rate=2e-5, per_device_train_batch_size=4, num_train_epochs=1,
                   report_to="none", dataset_kwargs={"skip_prepare_dataset": True}),
    train_dataset=data,
    data_collator=Collate(tokenizer),
    processing_class=tokenizer,
)  # fmt: skip
trainer.train()
