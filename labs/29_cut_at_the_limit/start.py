"""Lab 29: cut at the limit.

A small Qwen2, fine-tuned for chats, learns sums by GRPO in trl 0.22.

"Every completion runs into its length limit, whatever limit I set, and next to none is right. In our chat demo the same
checkpoint answers in a word or two and stops."

Make it learn. Model, number of steps and learning rate stay, and so does what counts as right: the checker counts right
answers itself, whatever the script's own reward says.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left", eos_token="<|endoftext|>")
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=4,
        per_device_train_batch_size=96,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=8,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    return GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    for name in ("reward", "completions/clipped_ratio"):
        print(f"{name}: first {logged[0][name]:.2f}, last {logged[-1][name]:.2f}")
