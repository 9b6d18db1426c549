"""Lab 03: the reward stays low.

A small Qwen2 learns sums by GRPO in trl 0.14. Only its last layer and the final norm are trained.

"The reward is low from the first step and stays there. I tried what helped the other team, and it changed nothing. Then
I tried what helped the team before, and that changed nothing either."

Make it learn. What lies below the last layer comes out as it went in, and what is trained keeps no activations, as now.
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
    for lower in (model.get_input_embeddings(), model.model.layers[0]):
        lower.requires_grad_(False)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=4,
        per_device_train_batch_size=24,  # prompts, in trl 0.14
        gradient_accumulation_steps=1,
        num_generations=4,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=1.0,
        beta=0.04,
        gradient_checkpointing=True,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
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
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first steps {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
