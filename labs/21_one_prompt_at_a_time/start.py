"""Lab 21: one prompt at a time.

"Both of our processes train. Then an evaluation answers one prompt at a time, and rank 1 stops: 'Input tensors need to
be on the same GPU'. With two prompts at once it goes on. accelerate has nothing to say about it."

Each of two processes is to have the 4-bit model whole on the GPU that it trains on, for training and for generation.
And name what was left behind: ANSWER.
"""

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig

ANSWER = {
    "verdict": "",  # of all that a 4-bit layer holds, what is not on its GPU: the name of the attribute
}

COMMAND = "accelerate launch --num_processes 2 train.py"
FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def prepare(model_path, output_dir):
    config = GRPOConfig(output_dir=output_dir, gradient_checkpointing=True, report_to=[])
    home = f"cuda:{PartialState().local_process_index}"
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map={"": 0})
    model.to(home)
    model.hf_device_map = {"": home}
    return model, config  # for GRPOTrainer(model, args=config, peft_config=..., ...)


if __name__ == "__main__":  # few machines have two GPUs, so this one asks the lab's simulated node
    from failurelab_course.labs.checker import by_hand

    by_hand.show(__file__, "node", "prepare")
