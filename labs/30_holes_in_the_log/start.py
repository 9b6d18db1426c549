"""Lab 30: holes in the log.

"Since we moved from trl 0.15 to the newest, the log has holes: there is no `kl` in it any more, and every `clip_ratio`
is 0 in every single step. It looks as if nothing held the policy, and as if PPO's part of the trainer had been switched
off. I would go back." What the run left behind lies in `run/`.

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
    "tensors_changed": None,  # of the model's tensors, by the whole training
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
    for row in trainer.state.log_history[:40:8]:
        print({name: value for name, value in row.items() if name in ("step", "loss", "kl") or "clip_ratio" in name})
