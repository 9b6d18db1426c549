"""Wrong fix: lab 20's other cure: one visible GPU, for both processes."""

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig

COMMAND = "CUDA_VISIBLE_DEVICES=0 accelerate launch --num_processes 2 train.py"
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def prepare(model_path, output_dir):
    config = GRPOConfig(output_dir=output_dir, gradient_checkpointing=True, report_to=[])
    home = f"cuda:{PartialState().local_process_index}"
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map={"": 0})
    model.to(home)
    model.hf_device_map = {"": home}
    return model, config  # for GRPOTrainer(model, args=config, peft_config=..., ...)
