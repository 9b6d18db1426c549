from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

dataset = load_dataset("json", data_files="data/chat.jsonl", split="train")


def mentions(completions, answer, **kwargs):
    return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]


trainer = RLOOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=mentions,
    args=RLOOConfig(output_dir="rloo", num_generations=2, per_device_train_batch_size=2, learning_rate=1e-5),
    train_dataset=dataset,
)
trainer.train()
