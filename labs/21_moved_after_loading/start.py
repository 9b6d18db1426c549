"""Lab 21: moved after loading.

Lab 11's script, repaired by somebody in a hurry: each of two processes loads the 4-bit model on GPU 0, moves it to its
own GPU, and writes that into the device map, so that accelerate is content. It trains. Then an evaluation answers one
prompt at a time, and rank 1 stops: "Input tensors need to be on the same GPU".

Make every process's model whole where it trains, for training and for generation. It stays in 4 bit.
"""

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig

COMMAND = "accelerate launch --num_processes 2 train.py"
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def prepare(model_path, output_dir):
    config = GRPOConfig(output_dir=output_dir, gradient_checkpointing=True, report_to=[])
    home = f"cuda:{PartialState().local_process_index}"
    # TODO: a 4-bit layer is more than its weight. What moves, and what stays behind?
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map={"": 0})
    model.to(home)
    model.hf_device_map = {"": home}
    return model, config  # for GRPOTrainer(model, args=config, peft_config=..., ...)


if __name__ == "__main__":  # few machines have two GPUs, so this one asks the lab's simulated node
    from failurelab_course.labs.checker import by_hand

    by_hand.show(__file__, "node", "prepare")
