"""Lab 34: the second GPU of the server.

"On my workstation this trains. On the server, which has two GPUs, the first pass ends in 'Input tensors need to be on
the same GPU', and the message names cuda:1. There is no cuda:1 in my script: each process loads the model on its own
GPU, and I start one process."

COMMAND is part of the script here: it is what you would type. Make it train in 4 bit on the server: a process has one
GPU, and no second one that it sees and does not use. And fill in ANSWER.
"""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig

ANSWER = {
    "verdict": "",  # the class of torch that brings the second GPU in, before any repair
}

COMMAND = "python train.py"
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def prepare(model_path, output_dir):
    config = GRPOConfig(output_dir=output_dir, gradient_checkpointing=True, report_to=[])
    own = {"": torch.cuda.current_device()}  # the config has asked for the rank
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map=own)
    return model, config  # for GRPOTrainer(model, args=config, peft_config=..., ...)


if __name__ == "__main__":  # few machines have two GPUs, so this one asks the lab's simulated node
    from failurelab_course.labs.checker import by_hand

    by_hand.show(__file__, "node", "prepare")
