"""Lab 35: too hard.

"Not one completion was rewarded in thirty steps, and grad_norm is 0 in each of them. My colleague says that the sums
are too hard for so small a model: where no completion is right, there is nothing to compare, so we should begin with
easier sums. I say that something else is wrong, but I cannot prove it."

Who is right? Fill in ANSWER, and make it learn. Model, sums, number of steps and learning rate stay.
"""

import csv
import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # "too hard", or "constant": the reward is the same whatever the model says
    "accuracy_before": None,  # share of the sums that the untrained model answers right, sampled at temperature 1
    "reward_of_right": None,  # what a right completion is rewarded with, in the script as you found it
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def read_rows(folder):
    """Write the sums to a table, as the one that our annotators keep, and read it."""
    table = pathlib.Path(folder, "sums.csv")
    table.parent.mkdir(parents=True, exist_ok=True)
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer"), *SUMS])
    return Dataset.from_csv(str(table), cache_dir=str(table.parent))


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=30,
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        warmup_steps=2,
        per_device_train_batch_size=96,
        num_generations=4,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        activation_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = read_rows(output_dir)
    return GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    for row in trainer.state.log_history[:40:8]:
        print(f"step {row['step']:2}", *(f"{name} {row[name]:.2f}" for name in ("reward", "reward_std", "grad_norm")))
