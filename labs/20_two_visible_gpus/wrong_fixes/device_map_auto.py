"""Wrong fix: let the library choose the devices."""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig

COMMAND = "python train.py"
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def prepare(model_path, output_dir):
    config = GRPOConfig(output_dir=output_dir, gradient_checkpointing=True, report_to=[])
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map="auto")
    return model, config  # for GRPOTrainer(model, args=config, peft_config=..., ...)
