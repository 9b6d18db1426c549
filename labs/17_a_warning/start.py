"""Lab 17: a warning in every step.

"torch says again and again that 'None of the inputs have requires_grad=True. Gradients will be None'. Threads about
this text are full of repairs, and none of them says how to tell whether one is needed."

A small Qwen2 learns sums by GRPO in trl 0.14, all weights, with checkpointing. Is this run broken? Measure it, and
fill in ANSWER. Change the training only if it is.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # "broken" or "harmless"
    "tensors_trainable": None,
    "tensors_without_gradient": None,  # of the trainable ones, after a backward pass
    "tensors_changed": None,  # of the trainable ones, by the whole training
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=70,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=7,
        per_device_train_batch_size=24,  # prompts, in trl 0.14
        gradient_accumulation_steps=1,
        num_generations=4,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=1.0,
        beta=0.04,
        gradient_checkpointing=True,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    trainer = GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.generation_config.use_cache = False  # checkpointed layers do not keep it
    return trainer


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    build_trainer(str(tiny), tempfile.mkdtemp()).train()
