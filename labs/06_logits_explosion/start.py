"""Lab 06: logits for the whole sequence.

A small Qwen2 learns sums by GRPO in trl 0.15.2, with transformers 4.48. It learns. But the training step holds logits
for every position of prompt and completion, where only the completion's are used. Here that is twice too many; with
prompts of a thousand tokens and Qwen2's whole vocabulary it is gigabytes, and the end of the run.

Make the model return no more rows than are used, and keep the scores right. Prompts, completions, batch and
checkpointing stay as they are.
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
        max_steps=60,
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
    # TODO: all rows of logits are made, and most are never used. Make no more than are needed.
    return GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    build_trainer(str(tiny), tempfile.mkdtemp()).train()
