"""Wrong fix: a reference model need not be quantized."""

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def load(model_path, device_map, **options):
    return AutoModelForCausalLM.from_pretrained(model_path, device_map=device_map, **options)


def load_models(model_path, rank):
    own = {"": PartialState().local_process_index}
    policy = load(model_path, own, quantization_config=FOUR_BIT)
    reference = load(model_path, "auto")
    return policy, reference
