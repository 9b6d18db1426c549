from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def reward_num_unique_chars(completions, **kwargs):
    return [float(len(set(c))) for c in completions]


training_args = GRPOConfig(
    output_dir="out", num_generations=4, per_device_train_batch_size=4, temperature=1.0, learning_rate=1e-5
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B",
    reward_funcs=reward_num_unique_chars,
    args=training_args,
    train_dataset=load_dataset("json", data_files="data/sums.jsonl", split="train"),
)
trainer.train()
