import re
from dataclasses import dataclass

from datasets import load_dataset
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer


@dataclass
class Settings:
    model: str = "Qwen/Qwen2-0.5B-Instruct"
    data: str = "trl-lib/chat"
    lr: float = 3e-6
    k: int = 4


class StopWhenGood(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and logs.get("reward", 0) > 0.95:
            control.should_training_stop = True


def last_number(completions, answer, **kwargs):
    result = []
    for turns, truth in zip(completions, answer):
        found = re.findall(r"-?\d+", turns[0]["content"])
        result.append(1.0 if found and found[-1] == truth else -1.0)
    return result


s = Settings()
trainer = RLOOTrainer(
    model=s.model,
    reward_funcs=last_number,
    args=RLOOConfig(
        output_dir="rloo-sums", learning_rate=s.lr, num_generations=s.k, per_device_train_batch_size=s.k * 2,
        max_completion_length=64, num_iterations=2, logging_steps=5, save_steps=500, report_to="none",
    ),
    train_dataset=load_dataset(s.data, split="train"),
    callbacks=[StopWhenGood()],
)  # fmt: skip
trainer.train()
