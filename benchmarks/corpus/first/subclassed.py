"""GRPO with a trainer of our own, which keeps the best reward it has seen."""

import logging

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)


class BestKeeper(GRPOTrainer):
    def __init__(self, *args, keep=True, **kwargs):
        super().__init__(*args, **kwargs)
        self.best = float("-inf") if keep else None

    def log(self, logs, *args, **kwargs):
        self.best = max(self.best, logs.get("reward", self.best))
        super().log({**logs, "best": self.best}, *args, **kwargs)


def digits(completions, **kwargs):
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in completions]


def run(checkpointing=True, temperature=0.7):
    config = GRPOConfig("runs/best", per_device_train_batch_size=8, num_generations=4, learning_rate=1e-5,
                        gradient_checkpointing=checkpointing, temperature=temperature, save_steps=50)
    trainer = BestKeeper("Qwen/Qwen2-0.5B", reward_funcs=[digits], args=config, keep=True,
                         train_dataset=load_dataset("json", data_files="data/sums.jsonl", split="train"))
    logger.info("starting")
    trainer.train()
    return trainer.best


run()
