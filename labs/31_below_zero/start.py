"""Lab 31: below zero.

"The loss is negative in about every third step: a loss below zero, how can that be? And in four of ten groups all
rewards are equal, `frac_reward_zero_std` says, so nearly half of what we generate teaches nothing. I think that
something is wrong with our rewards or with the sign of the loss."

Is this run broken? Measure it, and fill in ANSWER. Change the training only if it is.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # "broken" or "harmless"
    "tensors_without_gradient": None,  # of the trainable ones, after a backward pass
    "reward_first": None,  # mean over the first 4 steps, to a tenth
    "reward_last": None,  # mean over the last 10 steps, to a tenth
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        warmup_steps=2,
        per_device_train_batch_size=96,
        num_generations=4,
        max_completion_length=4,
        temperature=1.0,
        activation_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    trainer = GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)
    return trainer


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    for row in trainer.state.log_history[:40:4]:
        flat = row["frac_reward_zero_std"]
        print(f"step {row['step']:2}  loss {row['loss']:+.4f}  groups without variance {flat:.2f}")
