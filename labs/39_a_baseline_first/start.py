"""Lab 39: a baseline first.

GRPO under ZeRO-3. The trainer evaluates the model once before it trains, so that we know where it began.

"On one GPU the script has run for months. Under ZeRO-3 the baseline is printed, and then the first step ends with
'NoneType' object has no attribute 'backward'. I looked at the loss: it is a tensor, not None."

Make it train. The baseline must still be there: an evaluation before the first step.
"""

import pathlib
import tempfile

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


class WithBaseline(GRPOTrainer):
    """GRPOTrainer that evaluates once before it trains."""

    def train(self, *args, **kwargs):
        print(f"before training: reward {self.evaluate()['eval_reward']:.2f}")
        return super().train(*args, **kwargs)


def build_trainer(model_path, output_dir):
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=4,
        learning_rate=1e-4,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        num_generations=4,
        max_completion_length=4,
        beta=0.0,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
        deepspeed=ZERO3,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    return WithBaseline(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        reward_funcs=exact,
        args=config,
        train_dataset=rows,
        eval_dataset=rows.select(range(0, len(rows), 50)),
        processing_class=AutoTokenizer.from_pretrained(model_path),
    )


if __name__ == "__main__":  # DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 train.py
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first steps {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
