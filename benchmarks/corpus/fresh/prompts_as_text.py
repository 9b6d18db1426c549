import os
import random

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model_id = os.environ.get("MODEL_ID", "Qwen/Qwen2-0.5B-Instruct")
style = os.environ.get("STYLE", "plain")
tokenizer = AutoTokenizer.from_pretrained(model_id)
tokenizer.padding_side = "left"

rng = random.Random(3)
pairs = [(rng.randrange(50), rng.randrange(50)) for _ in range(256)]


def render(a, b):
    question = f"What is the sum of {a} and {b}? Answer with the number only."
    if style == "plain":
        return question
    return tokenizer.apply_chat_template(
        [{"role": "system", "content": "You are a calculator."}, {"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=True,
    )


train_dataset = Dataset.from_dict({"prompt": [render(a, b) for a, b in pairs], "total": [a + b for a, b in pairs]})


def is_total(completions, total, **kwargs):
    return [1.0 if c.strip() == str(t) else -0.1 for c, t in zip(completions, total)]


def short(completions, **kwargs):
    return [max(0.0, 0.2 - len(c) / 500) for c in completions]


config = GRPOConfig(
    output_dir=f"sum-{style}",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=100,
    temperature=1.0,
    learning_rate=5e-6,
    gradient_checkpointing=False,
    report_to="none",
)
trainer = GRPOTrainer(model_id, [is_total, short], config, train_dataset=train_dataset, processing_class=tokenizer)
trainer.train()
