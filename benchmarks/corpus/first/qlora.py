import os

import torch
from accelerate import PartialState
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer

MAPS = {
    "current": lambda: {"": torch.cuda.current_device()},
    "rank": lambda: {"": PartialState().local_process_index},
    "variable": lambda: {"": int(os.environ.get("LOCAL_RANK", 0))},
    "auto": lambda: "auto",
    "none": lambda: None,
}
name = "Qwen/Qwen2-0.5B"
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(
    name, quantization_config=bnb, device_map=MAPS[os.environ.get("MAP", "current")](), torch_dtype=torch.bfloat16
)
tokenizer = AutoTokenizer.from_pretrained(name)


def reward(completions, answer, **kwargs):
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answer)]


trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=reward,
    train_dataset=load_dataset("json", data_files="data/sums.jsonl", split="train"),
    args=GRPOConfig(output_dir="qlora", num_generations=4, per_device_train_batch_size=4, learning_rate=1e-5,
                    temperature=1.0, gradient_checkpointing=False, optim="paged_adamw_8bit"),
    peft_config=LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", target_modules="all-linear"),
)
trainer.train()
