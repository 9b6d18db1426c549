"""Lab 20: two visible GPUs.

A machine has two GPUs. The script below loads a Qwen2 in 4 bit on the first one, and is started by COMMAND. The first
training pass ends in "Input tensors need to be on the same GPU", with devices in the message that the script never
named. On a machine with one GPU it runs.

Make it train, in 4 bit: every GPU that a process sees has a process of its own. COMMAND is part of the script here: it
is what you would type.
"""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig

# TODO: who made a copy of the model on the second GPU, and what did the copy lack?
COMMAND = "python train.py"
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def prepare(model_path, output_dir):
    config = GRPOConfig(output_dir=output_dir, gradient_checkpointing=True, report_to=[])
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map={"": 0})
    return model, config  # for GRPOTrainer(model, args=config, peft_config=..., ...)


if __name__ == "__main__":  # few machines have two GPUs, so this one asks the lab's simulated node
    from failurelab_course.labs.checker import by_hand

    by_hand.show(__file__, "node", "prepare")
