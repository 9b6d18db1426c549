"""Lab 06: before it goes to the cluster.

A small Qwen2 learns sums by GRPO in trl 0.15.2, with transformers 4.48.

"The reward rises and nothing warns: a healthy run. Next week it gets the real model, with prompts of a thousand tokens
and Qwen2's whole vocabulary. Is there anything in the training step that will not fit there?"

If there is, repair it, and keep the numbers right. Prompts, completions and checkpointing stay as they are.
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
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=128,  # completions, since trl 0.15
        gradient_accumulation_steps=1,
        num_generations=8,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
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
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first steps {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
