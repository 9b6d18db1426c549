import itertools
import re

import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

CONFIG = yaml.safe_load("""
output_dir: runs/count
learning_rate: 0.0008
lr_scheduler_type: cosine
max_steps: 40
per_device_train_batch_size: 64
gradient_accumulation_steps: 1
num_generations: 16
max_completion_length: 4
temperature: 1.0
beta: 0.0
gradient_checkpointing: false
bf16: false
logging_steps: 2
log_completions: true
save_strategy: "no"
report_to: none
seed: 0
""")
BASE = "models/counter"


def load_data():
    words = ["".join(letters) for letters in itertools.product("abc", repeat=5)]
    data = Dataset.from_dict({"word": words}).map(lambda row: {"letter": "ab"[len(row["word"].replace("c", "")) % 2]})
    return data.map(lambda row: {
        "prompt": f"{row['letter']} in {row['word']}?",
        "solution": str(row["word"].count(row["letter"])),
    })  # fmt: skip


def count_reward(prompts, completions, solution, **kwargs):
    return [1.0 if text.strip() == right else 0.0 for text, right in zip(completions, solution)]


def format_reward(prompts, completions, **kwargs):
    return [1.0 if re.fullmatch(r"\d", text.strip()) else 0.0 for text in completions]


grpo = GRPOConfig(**CONFIG, reward_weights=[1.0, 0.1])
tok = AutoTokenizer.from_pretrained(BASE, padding_side="left")
policy = AutoModelForCausalLM.from_pretrained(BASE)
trainer = GRPOTrainer(
    model=policy,
    reward_funcs=[count_reward, format_reward],
    args=grpo,
    train_dataset=load_data(),
    processing_class=tok,
)
result = trainer.train()
trainer.save_state()
print("final loss", round(result.training_loss, 5))
