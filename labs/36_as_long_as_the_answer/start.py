"""Lab 36: as long as the answer.

"The reward falls, from 0.45 to 0.27 in forty steps, and the evaluation falls with it. The reward function is right: I
fed it by hand, and it pays right answers alone. We took no risk with the length: the limit is what the longest answer
has, and what was cut is not trained on, as the papers recommend."

Make it learn. Sums, reward, number of steps and learning rate stay.
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
    longest = max(len(tokenizer(answer)["input_ids"]) for _, answer in SUMS)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=8e-4,
        lr_scheduler_type="linear",
        warmup_steps=2,
        per_device_train_batch_size=96,
        num_generations=4,
        max_completion_length=longest,
        mask_truncated_completions=True,
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
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    return GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    for row in trainer.state.log_history[:40:8]:
        print(f"step {row['step']:2}", *(f"{name} {row[name]:.2f}" for name in ("reward", "reward_std", "loss")))
