"""Lab 22: on new GPUs.

"We moved to new GPUs and new libraries on Tuesday. Since then the reward of this run has been flat. Nothing else looks
wrong: the rollouts are as good as the model, grad_norm is what it was, no warning, no error. On the old machine the
same options learned from the first hundred steps on. We have not touched the learning rate: our sweep found 3e-5, and a
larger one broke the full model."

Find out what happens to the updates, and make it learn. The learning rate stays.
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
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=60,
        learning_rate=3e-5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        bf16=False,
        activation_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    return GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    print("reward:", [round(row["reward"], 2) for row in trainer.state.log_history if "reward" in row])
