"""Wrong fix: the same line, where the model is loaded: the process still has not been given its device."""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def load_model(model_path, rank):
    device_map = {"": torch.get_device_module().current_device()}
    return AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map=device_map)
