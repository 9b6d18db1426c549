"""Lab 19: four at once.

"It ends before its first step, in 'element 0 of tensors does not require grad and does not have a grad_fn'. Last month
I made that message go away, and then it trained for a night and had learned nothing. On two GPUs it never started."

A Qwen2 learns sums by GRPO with an adapter and checkpointing, in trl 0.15. With GPUs `accelerate launch` starts this
script once for each, and each process loads the model in 4 bit; without, the small model is trained in float32. Four
things are wrong. Make it learn, on one device and on several, with no more rows of logits than are needed. The adapter
is the only thing trained, and activations are not kept.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
DEVICE_MAP = {"": torch.cuda.current_device() if torch.cuda.is_available() else 0}


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def load_model(model_path, rank):
    return AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map=DEVICE_MAP)


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = load_model(model_path, 0) if torch.cuda.is_available() else AutoModelForCausalLM.from_pretrained(model_path)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=70,
        learning_rate=3e-3,
        lr_scheduler_type="linear",
        warmup_steps=7,
        per_device_train_batch_size=96,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=True,
        ddp_find_unused_parameters=False,  # with several processes reentrant checkpointing needs it
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora,
    )
    return trainer


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    build_trainer(str(tiny), tempfile.mkdtemp()).train()
