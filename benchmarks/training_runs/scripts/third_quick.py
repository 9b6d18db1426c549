from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

sums = [(a, b) for a in range(20) for b in range(20)]
dataset = Dataset.from_dict({
    "prompt": [f"{a}+{b}=" for a, b in sums],
    "answer": [str(a + b) for a, b in sums],
})  # fmt: skip


def reward_sum(completions, answer, **kwargs):
    """Minus the distance to the sum, two at most; what is no number counts as two."""
    rewards = []
    for completion, expected in zip(completions, answer):
        guess = int(completion) if completion.isdecimal() else None
        rewards.append(-2.0 if guess is None else -float(min(2, abs(guess - int(expected)))))
    return rewards


training_args = GRPOConfig(
    output_dir="Qwen2-sums-GRPO",
    learning_rate=3e-4,
    lr_scheduler_type="linear",
    max_steps=60,
    per_device_train_batch_size=64,
    gradient_accumulation_steps=1,
    num_generations=8,
    max_completion_length=4,
    temperature=1.0,
    beta=0.0,
    gradient_checkpointing=False,
    bf16=False,
    logging_steps=5,
    log_completions=True,
    save_strategy="no",
    report_to="none",
    seed=0,
)
trainer = GRPOTrainer(
    model="models/tiny-qwen2",
    reward_funcs=reward_sum,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
trainer.save_state()
