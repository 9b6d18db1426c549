import dataclasses
import random

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


@dataclasses.dataclass
class Settings:
    model_name: str = "models/larger-chat"
    tokenizer_name: str = "models/larger-chat"
    learning_rate: float = 3e-4
    max_steps: int = 36
    per_device_train_batch_size: int = 60
    num_generations: int = 5
    max_completion_length: int = 10
    beta: float = 0.0
    temperature: float = 1.0
    logging_steps: int = 3
    seed: int = 0


class LargerReward:
    """1 if the larger number was named, 0.1 if it was the other one."""

    __name__ = "larger_reward"

    def __init__(self, other=0.1):
        self.other = other

    def score(self, text, answer, wrong):
        if text == answer:
            return 1.0
        return self.other if text == wrong else 0.0

    def __call__(self, prompts, completions, answer, wrong, **kwargs):
        texts = [messages[-1]["content"].strip() for messages in completions]
        return [self.score(*row) for row in zip(texts, answer, wrong)]


def make_prompt(a, b):
    return [{"role": "user", "content": f"{a} or {b}"}]


def make_dataset():
    pick = random.Random(7)
    pairs = [tuple(pick.sample(range(10, 60), 2)) for _ in range(360)]
    return Dataset.from_list(
        [{"prompt": make_prompt(a, b), "answer": str(max(a, b)), "wrong": str(min(a, b))} for a, b in pairs]
    )


def load(settings):
    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings.model_name)
    return model, tokenizer


def run(settings):
    model, tokenizer = load(settings)
    config = GRPOConfig(
        output_dir="larger",
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=1,
        num_generations=settings.num_generations,
        max_completion_length=settings.max_completion_length,
        temperature=settings.temperature,
        beta=settings.beta,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=settings.logging_steps,
        log_completions=True,
        save_strategy="no",
        report_to="none",
        seed=settings.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[LargerReward()],
        args=config,
        train_dataset=make_dataset(),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_state()
    return trainer


if __name__ == "__main__":
    run(Settings())
