"""Lab 43: twice the machine.

"With one process it learned the sums. Now two processes have a half of the batch each, at the same learning rate, and
the log's grad_norm is half of what it was. My colleague says that two cards learn worse than one. There are threads
about it, and nobody in them knows why."

Make two processes learn as one did. Options and the rate stay.

By hand: torchrun --nproc_per_node 2 train.py
"""

import pathlib
import tempfile

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]
BATCH = 96  # completions of a step, over all processes
GENERATIONS = 8


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


class TwoProcessTrainer(GRPOTrainer):
    """GRPO whose batch is spread over processes."""

    def compute_loss(self, model, inputs, *rest, **options):
        loss = super().compute_loss(model, inputs, *rest, **options)
        share = len(inputs["completion_ids"]) / BATCH  # of the batch that lies here
        return loss * share


def build_trainer(model_path, output_dir):
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=60,
        optim="sgd",
        learning_rate=0.02,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=BATCH // 2,
        num_generations=GENERATIONS,
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
    return TwoProcessTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        reward_funcs=exact,
        args=config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
    )


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history[:60:6]:
            print(f"step {row['step']:2}", *(f"{name} {row[name]:.3f}" for name in ("loss", "grad_norm", "reward")))
