"""Wrong fix: let the library choose the devices."""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def load_model(model_path, rank):
    return AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map="auto")
