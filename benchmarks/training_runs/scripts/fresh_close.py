import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

CHECKPOINT = "models/tiny-qwen2"
hparams = dict(
    max_steps=48,
    learning_rate=2.5e-4,
    per_device_train_batch_size=40,
    gradient_accumulation_steps=1,
    num_generations=10,
    max_completion_length=5,
    temperature=1.0,
    beta=0.0,
    max_grad_norm=0.5,
    gradient_checkpointing=False,
    bf16=False,
    logging_steps=1,
    log_completions=True,
    save_strategy="no",
    report_to="none",
    seed=0,
)


class LoggingTrainer(GRPOTrainer):
    """Keeps the best reward and prints it at the end."""

    best = 0.0

    def log(self, logs, *args, **kwargs):
        self.best = max(self.best, logs.get("reward", 0.0))
        return super().log(logs, *args, **kwargs)


def closeness(completions, answer, **kwargs):
    """1 for the right sum, half of it for a neighbour of it."""
    rewards = []
    for completion, right in zip(completions, answer):
        try:
            off = abs(int(completion) - int(right))
        except ValueError:
            off = 99
        rewards.append(1.0 if off == 0 else 0.5 if off == 1 else 0.0)
    return rewards


def get_policy():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT)


set_seed(hparams["seed"])
numbers = torch.arange(20)
table = [(int(a), int(b)) for a in numbers for b in numbers if a >= b]
data = Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a, b in table])
tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, padding_side="left")
policy = get_policy()
trainer = LoggingTrainer(
    policy,
    reward_funcs=closeness,
    args=GRPOConfig("sums-run", **hparams),
    train_dataset=data,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_state()
print(f"best mean reward: {trainer.best:.3f}")
