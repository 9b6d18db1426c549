import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model_id = "Qwen/Qwen2-0.5B"
model = AutoModelForCausalLM.from_pretrained(model_id)
tokenizer = AutoTokenizer.from_pretrained(model_id)


def format_reward(completions, **kwargs):
    return [0.5 * ("<answer>" in c) + 0.5 * ("</answer>" in c) for c in completions]


def accuracy(completions, answer, **kwargs):
    return [1.0 if a in c else 0.0 for a, c in zip(answer, completions)]


config = GRPOConfig(output_dir="run1", learning_rate=1e-6, num_generations=8, per_device_train_batch_size=8, beta=0.01)
trainer = GRPOTrainer(model=model, args=config, reward_funcs=[format_reward, accuracy], processing_class=tokenizer,
                      train_dataset=load_dataset("json", data_files="data/sums.jsonl", split="train"))
trainer.train()
