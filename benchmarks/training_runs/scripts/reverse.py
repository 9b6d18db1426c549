import itertools

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

WORDS = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]


def backwards(prompts, completions, **kwargs):
    return [1.0 if completion == prompt[2::-1] else 0.0 for prompt, completion in zip(prompts, completions)]


rows = Dataset.from_dict({"prompt": [f"{word}>" for word in WORDS], "answer": [word[::-1] for word in WORDS]})
tokenizer = AutoTokenizer.from_pretrained("models/tiny-qwen2-reverse")
args = GRPOConfig(
    output_dir="reverse",
    max_steps=50,
    learning_rate=4e-4,
    lr_scheduler_type="linear",
    per_device_train_batch_size=64,
    gradient_accumulation_steps=1,
    num_generations=4,
    max_completion_length=6,
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
    model="models/tiny-qwen2-reverse",
    reward_funcs=backwards,
    args=args,
    train_dataset=rows,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_state()
