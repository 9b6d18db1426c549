"""Wrong fix: move the scales too."""

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig

COMMAND = "accelerate launch --num_processes 2 train.py"
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def prepare(model_path, output_dir):
    config = GRPOConfig(output_dir=output_dir, gradient_checkpointing=True, report_to=[])
    home = f"cuda:{PartialState().local_process_index}"
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map={"": 0})
    model.to(home)
    for module in model.modules():
        if getattr(module, "quant_state", None) is not None:
            module.quant_state.absmax = module.quant_state.absmax.to(home)
    model.hf_device_map = {"": home}
    return model, config  # for GRPOTrainer(model, args=config, peft_config=..., ...)
