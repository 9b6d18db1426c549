"""Lab 44: to the last digit.

"Every run of ours has to be repeatable, so each step begins with a seed of its own, and our loader hands out the rows
in an order that we know. We took a second process for more completions a step. Now each step takes twice the machine,
and the log is that of one process, to the last digit."

Make the second process worth its place. A step has its seed, and all options stay. Fill in ANSWER as well.

By hand: torchrun --nproc_per_node 2 train.py
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # what both processes have in common as the script was: "rewards", "prompts" or "weights"
    "prompts": None,  # different prompts of a step, over both processes, as the script was
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


class Repeatable(TrainerCallback):
    """Begins each step with a seed of its own."""

    def on_step_begin(self, args, state, control, **_):
        torch.manual_seed(1000 * args.seed + state.global_step)


class OrderedTrainer(GRPOTrainer):
    """GRPO on rows in an order that is known."""

    def get_train_dataloader(self):
        size = self.args.per_device_train_batch_size * self.args.steps_per_generation
        return DataLoader(
            self.train_dataset,
            batch_size=size,
            sampler=self._get_train_sampler(),
            collate_fn=self.data_collator,
            drop_last=True,
        )


def build_trainer(model_path, output_dir):
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=30,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=48,
        num_generations=8,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        activation_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    return OrderedTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        reward_funcs=exact,
        args=config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        callbacks=[Repeatable()],
    )


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history[:30:5]:
            print(f"step {row['step']:2}", *(f"{name} {row[name]:.4f}" for name in ("reward", "grad_norm")))
