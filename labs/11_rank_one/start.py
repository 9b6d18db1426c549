"""Lab 11: rank one.

A 4-bit Qwen2 is trained by two processes, one for each device.

"Rank 0 starts. Rank 1 stops with a ValueError: the model is on a different device than the one it is trained on. The
message advises a line, and it is the line that we have."

Make every rank load its model where it trains. The model stays in 4 bit.
"""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
DEVICE_MAP = {"": torch.get_device_module().current_device()}  # torch.cuda's, on a machine with GPUs


def load_model(model_path, rank):
    return AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map=DEVICE_MAP)


if __name__ == "__main__":  # few machines have two GPUs, so this one asks the lab's simulated node
    from failurelab_course.labs.checker import by_hand

    by_hand.show(__file__, "placement", "load_model")
