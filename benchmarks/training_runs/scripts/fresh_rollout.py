import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

NAME = "models/tiny-qwen2"
LENGTH = 5


def build_sampler(tokenizer):
    sampler = AutoModelForCausalLM.from_pretrained(NAME).eval()

    def push_weights(source):
        weights = {key: value.detach().clone() for key, value in source.named_parameters()}
        sampler.load_state_dict(weights, strict=False)

    def rollout(prompts, trainer):
        push_weights(trainer.model)
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            full = sampler.generate(**batch, max_new_tokens=LENGTH, do_sample=True, top_k=0, temperature=1.0)
        prompt_ids, completion_ids = [], []
        for row, ids, mask in zip(full, batch["input_ids"], batch["attention_mask"]):
            new = row[len(ids) :].tolist()
            stop = tokenizer.eos_token_id
            completion_ids.append(new[: new.index(stop) + 1] if stop in new else new)
            prompt_ids.append(ids[mask == 1].tolist())
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    return rollout


def is_right(completions, answer, log_metric=None, **kwargs):
    hits = [float(text == right) for text, right in zip(completions, answer)]
    return hits


def train():
    tokenizer = AutoTokenizer.from_pretrained(NAME, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(NAME)
    args = GRPOConfig(
        output_dir="rollouts",
        max_steps=60,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=64,
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=LENGTH,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=5,
        log_completions=True,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    pairs = [(a, b) for a in range(20) for b in range(20)]
    data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[is_right],
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        rollout_func=build_sampler(tokenizer),
    )
    trainer.train()
    trainer.save_state()


train()
