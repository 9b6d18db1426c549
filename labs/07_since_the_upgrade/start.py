"""Lab 07: since the upgrade.

A small Qwen2 learns sums by GRPO in trl 0.14.0, with transformers 4.52, which trl's metadata allow.

"The reward falls since Tuesday's upgrade, and nobody touched the script. The folder run/ has what the run left behind:
log, trainer_state.json, versions; run/before the same of the last run before the upgrade."

Make it learn. The versions stay, and so do trainer, learning rate, beta and number of steps.
"""

import pathlib
import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

# All prompts have five characters, so that none is padded.
SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20) if len(f"{a}+{b}=") == 5]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = Qwen2ForCausalLM.from_pretrained(model_path)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=70,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=16,  # prompts, in trl 0.14
        gradient_accumulation_steps=1,
        num_generations=8,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=1.0,
        beta=0.04,
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
    trainer = build_trainer(str(tiny), sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    trainer.train()
    trainer.save_state()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first steps {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
