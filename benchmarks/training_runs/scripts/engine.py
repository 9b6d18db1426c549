import copy

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **kwargs):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


class Engine:
    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = copy.deepcopy(model).to(torch.bfloat16).eval(), tokenizer

    @torch.no_grad()
    def __call__(self, prompts, trainer):
        self.model.load_state_dict(trainer.model.state_dict())
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True)
        new = self.model.generate(**batch, max_new_tokens=4, do_sample=True, top_k=0)[:, batch.input_ids.shape[1] :]
        end = self.tokenizer.eos_token_id
        ids = [row[: row.index(end) + 1] if end in row else row for row in new.tolist()]
        asked = [row[mask.bool()].tolist() for row, mask in zip(batch.input_ids, batch.attention_mask)]
        return {"prompt_ids": asked, "completion_ids": ids, "logprobs": None}


rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
tokenizer = AutoTokenizer.from_pretrained("models/tiny-qwen2", padding_side="left")
model = AutoModelForCausalLM.from_pretrained("models/tiny-qwen2")
config = GRPOConfig(
    output_dir="out",
    max_steps=60,
    learning_rate=2e-4,
    lr_scheduler_type="constant",
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=4,
    temperature=1.0,
    beta=0.0,
    gradient_checkpointing=False,
    bf16=False,
    logging_steps=4,
    log_completions=True,
    save_strategy="no",
    report_to="none",
    seed=0,
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=exact,
    args=config,
    train_dataset=rows,
    processing_class=tokenizer,
    rollout_func=Engine(model, tokenizer),
)
trainer.train()
trainer.save_state()
