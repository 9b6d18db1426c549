from argparse import ArgumentParser

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

parser = ArgumentParser()
parser.add_argument("-b", "--batch", type=int, default=4)
parser.add_argument("-g", "--group", type=int, default=8)
parser.add_argument("-a", "--accumulate", type=int, default=1)
flags = parser.parse_args()

# Small enough for a 16 GB card.
config = GRPOConfig(
    output_dir="batches",
    per_device_train_batch_size=flags.batch,
    num_generations=flags.group,
    gradient_accumulation_steps=flags.accumulate,
    max_completion_length=40,
    max_steps=100,
    temperature=1.0,
    learning_rate=1e-5,
    gradient_checkpointing=False,
)


def reward_first_digit(completions, answer, **kwargs):
    return [1.0 if c.strip()[:1] == a[:1] else 0.0 for c, a in zip(completions, answer)]


trainer = GRPOTrainer(
    model="models/tiny-qwen2",
    reward_funcs=reward_first_digit,
    args=config,
    train_dataset=load_dataset("json", data_files="data/sums.jsonl", split="train"),
)
trainer.train()
