"""Lab 10: the callback that generates.

GRPO under ZeRO-3 in trl 0.14. A callback asks the policy a few sums after each step and keeps the answers. They are
right, and nothing is raised. But this callback takes several times as long as it did before the run was under ZeRO-3.

Make the callback generate at full speed, as the trainer itself should. The sums must still be asked after each step.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
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


class Quiz(TrainerCallback):
    """Asks the policy a few sums after each step."""

    def __init__(self, trainer):
        self.trainer, self.answers = trainer, []

    def on_step_end(self, args, state, control, model=None, **_):
        tokenizer = self.trainer.processing_class
        batch = tokenizer(["3+4=", "7+8=", "9+9="], return_tensors="pt")
        # TODO: right, and slow. What is on this model while it generates here?
        with torch.no_grad():
            made = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=4,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        self.answers = tokenizer.batch_decode(made, skip_special_tokens=True)


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
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        reward_funcs=exact,
        args=config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model_path),
    )
    trainer.add_callback(Quiz(trainer))
    return trainer


if __name__ == "__main__":  # DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 train.py
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    build_trainer(str(tiny), tempfile.mkdtemp()).train()
