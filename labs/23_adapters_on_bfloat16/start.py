"""Lab 23: adapters on bfloat16.

"I have read that updates of weights in bfloat16 round to nothing, and our LoRA run loads its model in bfloat16. I want
to load it in float32 and pay for twice the memory. Or is the run well as it is?"

Measure it, and fill in ANSWER. Change the training only if it is broken.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # "broken" or "harmless"
    "elements_changed": None,  # the share of the adapters' numbers that training changes
    "frozen_changed": None,  # how many of the model's own tensors it changes
    "tensors_without_gradient": None,  # of the trainable ones, after a backward pass
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        bf16=False,
        activation_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return GRPOTrainer(
        model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer, peft_config=lora
    )


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    print("the model is kept in", trainer.model.get_input_embeddings().weight.dtype)
    trainer.train()
