"""Wrong fix: a setting of the distributed run."""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
DEVICE_MAP = {"": torch.get_device_module().current_device()}  # torch.cuda's, on a machine with GPUs
SETTINGS = {"ddp_find_unused_parameters": False, "fsdp": ""}  # for TrainingArguments


def load_model(model_path, rank):
    return AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map=DEVICE_MAP)
