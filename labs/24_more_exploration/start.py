"""Lab 24: more exploration.

A small Qwen2 learns sums by GRPO in trl 0.15.

"On Monday I turned the sampling temperature up to 1.5, so that the model explores more, and the run learns. But when I
score its completions at 1.5 with another tool, I get other log-probabilities than the trainer: the trainer's are larger
for three tokens of four. Is it the tool, or is it us?"

Let the trainer score what it draws, at 1.5 or at another temperature. Fill in ANSWER about the script as you found it.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # "the tool", "the trainer" or "both are right"
    "drawn_at": None,  # the temperature at which completions are drawn
    "scored_at": None,  # the temperature at which their tokens are scored
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
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=128,  # completions
        gradient_accumulation_steps=1,
        num_generations=8,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=1.5,
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
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first steps {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
