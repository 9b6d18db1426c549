"""Lab 09: no attribute 'optimizer'.

GRPO under ZeRO-3 in trl 0.14. This trainer draws a few answers at the start of each step, to watch what the policy
says.

"It worked for months. Since we put it under ZeRO-3 it ends with 'Qwen2ForCausalLM' object has no attribute 'optimizer',
and a colleague's patch that got rid of the error made it slow."

Make it train at full speed. The answers must still be drawn at each step, under ZeRO-3.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

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


class WatchedTrainer(GRPOTrainer):
    """GRPOTrainer that draws answers to a few prompts at the start of each step, and keeps them."""

    answers = ()

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.answers = self.draw([row["prompt"] for row in inputs[:4]])
        return super().training_step(model, inputs, num_items_in_batch)

    def draw(self, prompts):
        batch = self.processing_class(prompts, return_tensors="pt", padding=True, padding_side="left")
        with unwrap_model_for_generation(self.model, self.accelerator) as policy, torch.no_grad():
            made = policy.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=4,
                do_sample=False,
                pad_token_id=self.processing_class.pad_token_id,
            )
        return self.processing_class.batch_decode(made, skip_special_tokens=True)


def build_trainer(model_path, output_dir):
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=4,
        learning_rate=1e-4,
        per_device_train_batch_size=8,  # prompts, in trl 0.14
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=4,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
        deepspeed=ZERO3,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    return WatchedTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        reward_funcs=exact,
        args=config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model_path),
    )


if __name__ == "__main__":  # DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 train.py
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first steps {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
