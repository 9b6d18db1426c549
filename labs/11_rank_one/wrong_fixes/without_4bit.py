"""Wrong fix: do without 4 bit."""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
DEVICE_MAP = {"": torch.get_device_module().current_device()}  # torch.cuda's, on a machine with GPUs


def load_model(model_path, rank):
    return AutoModelForCausalLM.from_pretrained(model_path, device_map=DEVICE_MAP)
