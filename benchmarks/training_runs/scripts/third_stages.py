import random

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

BASE = "models/tiny-qwen2-base"
SFT_STEPS, SFT_LR = 20, 1e-3
grpo_kwargs = dict(
    output_dir="exp/stage2",
    max_steps=45,
    learning_rate=5e-4,
    lr_scheduler_type="constant",
    per_device_train_batch_size=80,
    gradient_accumulation_steps=1,
    num_generations=8,
    max_completion_length=5,
    temperature=1.0,
    beta=0.0,
    gradient_checkpointing=False,
    bf16=False,
    logging_steps=3,
    log_completions=True,
    save_strategy="no",
    report_to="none",
    seed=0,
)


class Experiment:
    def __init__(self):
        set_seed(grpo_kwargs["seed"])
        self.tokenizer = AutoTokenizer.from_pretrained(BASE, padding_side="left")
        self.rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 10) for b in range(3, 10)]

    def batch(self, rows):
        texts = [row["prompt"] + row["answer"] + "<|im_end|>" for row in rows]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    def sft(self):
        """Stage 1: a little supervised learning."""
        model = AutoModelForCausalLM.from_pretrained(BASE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR)
        pick = random.Random(0)
        for _ in range(SFT_STEPS):
            model(**self.batch(pick.sample(self.rows, 32))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained("exp/stage1")
        return "exp/stage1"

    def reward(self, completions, answer, **kwargs):
        return [float(text == right) for text, right in zip(completions, answer)]

    def grpo(self, path):
        """Stage 2: GRPO from what stage 1 left."""
        model = AutoModelForCausalLM.from_pretrained(path)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[self.reward],
            args=GRPOConfig(**grpo_kwargs),
            train_dataset=Dataset.from_list(self.rows),
            processing_class=self.tokenizer,
        )
        trainer.train()
        trainer.save_state()


experiment = Experiment()
experiment.grpo(experiment.sft())
